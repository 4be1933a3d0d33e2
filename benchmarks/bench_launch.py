"""Measures the host's CPU time per kernel launch of a step that no graph replays, in this checkout and another one by turns.

    python benchmarks/bench_launch.py --tree DIR [--pairs 10]

Kernels are compiled for Hopper and launched by Triton's launcher in C over a driver that does nothing
(tests/support/idle_gpu.py). The models are as deep as real ones and otherwise tiny, which the host does not notice. A
launch's time is the difference between steps with launches and without, divided by their number; CUDA's own part of a
launch is not included.
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from pairs import HERE, ROOT, Asked, answer_questions, compare, environment, main

REPEATS = 30
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
TINY |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "linear_key_head_dim": 16}
TINY |= {"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}


def launch(tree: str | None = None, pairs: int = 10) -> dict[str, Any]:
    if tree is None:
        raise SystemExit("--tree: the other checkout's folder is required; its extension must be built")
    figures = {}
    for model in ("qwen3-0.6b", "hybrid"):
        with ExitStack() as stack:
            sides = {}
            for side, root in (("ours", ROOT), ("theirs", Path(tree).resolve())):
                command = (sys.executable, str(HERE / "bench_launch.py"), "side", "--model", model)
                worker = stack.enter_context(Asked(*command, env=environment(root)))
                print(f"{model}, {side}: {worker.started} launches a step", flush=True)
                sides[side] = lambda worker=worker: worker.ask(None)
            figures[model] = compare(f"{model}, a launch", sides, pairs, "µs")
    return {"against": Path(tree).name, "pairs": pairs, "figures": figures}


def side(model: str = "qwen3-0.6b") -> None:
    """Measure the checkout that PYTHONPATH names; the parent process asks."""
    spec = importlib.util.spec_from_file_location("idle_gpu", ROOT / "tests/support/idle_gpu.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(idle_gpu := importlib.util.module_from_spec(spec))
    with tempfile.TemporaryDirectory() as folder:
        idle_gpu.install(folder)
        import torch

        from penstock.executor.kernels.cuda.launch import Kernel

        torch.set_num_threads(1)
        step = one_step(model)
        step()  # compiles
        with mock.patch.object(Kernel, "_launch") as launches:
            step()

        def launch_us(_question: None) -> float:
            with mock.patch.object(Kernel, "_launch", lambda *_arguments, **_keywords: None):
                without_s = least_s(step)
            return (least_s(step) - without_s) / launches.call_count * 1e6

        answer_questions(launch_us, launches.call_count)


def one_step(name: str) -> Callable[[], None]:
    """Return a call of the layers of a step with one prompt, of a model with the real number of layers."""
    import pytest
    import torch
    from benchmarks.gpu.shapes import HYBRID, MODELS, model_folder
    from tests.support.checkpoints import compute_with
    from tests.support.driver import Driver

    from penstock.executor.kernels.cuda.ops import OPS
    from penstock.executor.protocol import ExecutorConfig
    from penstock.executor.uniproc import UniprocExecutor

    compute_with(pytest.MonkeyPatch(), OPS)
    config = HYBRID if name == "hybrid" else MODELS[name]
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy", "kv_cache_bytes": 2**24}
    with model_folder(config | TINY) as folder:
        executor = UniprocExecutor(ExecutorConfig(model=folder, max_model_len=256, **options))
    model = executor._rank.runner._model
    seen: list[Any] = []
    forward = model.forward
    with mock.patch.object(
        type(model), "forward", lambda _self, *arguments: seen.append(arguments) or forward(*arguments)
    ):
        driver = Driver(executor)
        sequence = driver.admit([3] * 48)
        driver.step_unchecked((sequence, driver.row(sequence)))
    batch, pages = seen[0]

    def step() -> None:
        batch.memo.clear()
        with torch.inference_mode():
            forward(batch, pages)

    return step


def least_s(call: Callable[[], None]) -> float:
    """Return the least CPU time of several calls: whatever else runs on the core only adds."""
    times = []
    for _ in range(REPEATS):
        started_s = time.thread_time()
        call()
        times.append(time.thread_time() - started_s)
    return min(times)


if __name__ == "__main__":
    main(__doc__, "host", launch, side)
