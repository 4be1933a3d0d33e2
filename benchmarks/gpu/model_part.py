"""Models with random weights: start, decoding and prompts.

    python -m benchmarks.gpu model_part '{"models": ["qwen3-0.6b"], "device": "cuda", "tiny": false, "parts": ["decode"], …}'

Decoding and prompts go to the executor directly: no scheduler, requests that are "at" a length because the cache holds
random numbers there. Requests through the whole engine are the subject of beside.py. Without `engine` in the job there
is no engine and no measuring of memory, the shortest way from nothing to a step's time; it is measured with kernels that
may start early, with kernels launched as usual, and with `batch_invariant`, to show what each costs.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.batches import fill
from benchmarks.gpu.figures import open_device, report, set_launch
from benchmarks.gpu.shapes import config_of, decode_bytes, model_folder
from benchmarks.gpu.steps import Steps
from torch import profiler
from torch.profiler import ProfilerActivity

from penstock.executor.protocol import Executor, ExecutorConfig, Row
from penstock.executors import open_executor

VARIANTS: dict[str, dict[str, Any]] = {
    "dependent launch": {},
    "usual launch": {"dependent": False},
    "fixed sums": {"options": {"batch_invariant": True}},
}
NUM_KERNELS = 15  # slowest kernels to list from a profile
KV_BYTES = 40 << 30  # 256 requests of Llama-3.1-8B at 1,100 positions; fits on an H100 beside its weights


def main(job: dict[str, Any]) -> None:
    open_device(job)
    for model in job["models"]:
        if job.get("engine"):
            measure(model, job, "")
            continue
        for variant, options in VARIANTS.items() if job["device"] == "cuda" else [("dependent launch", {})]:
            measure(model, job | options, f"{model}, {variant}: ")
            gc.collect()
            torch.cuda.empty_cache()  # nothing happens without a GPU


def measure(model: str, job: dict[str, Any], prefix: str) -> None:
    config, started_s = config_of(model, job["tiny"]), time.time()
    set_launch(job)
    with model_folder(config) as folder:
        llm, executor = open_model(folder, config, job)
        if "startup" in job["parts"]:
            began_s = job["started_s"] if job.get("engine") else started_s
            report("startup", prefix, seconds=time.time() - began_s, memory=executor.info.memory)
        Bench(executor, config, job, partial(report, prefix=prefix)).run()
        executor.close() if llm is None else llm.shutdown()


def open_model(folder: str, config: dict[str, Any], job: dict[str, Any]) -> tuple[Any, Executor]:
    """Return the engine and its executor; only the executor if the engine is not needed. `options` of the job replace
    those of the measurements."""
    options: dict[str, Any] = {
        "device": job["device"],
        "load_format": "dummy",
        "max_model_len": min(8192, config["max_position_embeddings"]),
        "max_num_seqs": 256,
    }
    options |= job.get("options", {})
    if job["tiny"]:
        options |= {"max_num_seqs": 8, "kv_cache_bytes": 2**22}
    if not job.get("engine"):
        return None, open_executor(ExecutorConfig(model=folder, **{"kv_cache_bytes": KV_BYTES} | options))
    from penstock import LLM

    # Artificial prompts share no prefixes, so prefix lookups would only cost time.
    llm = LLM(folder, skip_tokenizer=True, enable_prefix_caching=False, max_num_batched_tokens=8192, **options)
    assert llm._core is not None
    return llm, llm._core.executor


class Bench:
    """Runs artificial steps: every request has its slot and blocks, and nothing is ever freed."""

    def __init__(
        self, executor: Executor, config: dict[str, Any], job: dict[str, Any], note: Callable[..., None]
    ) -> None:
        """`note` gets the name and the figures of each measurement, as `report` does."""
        self._executor, self._config, self._job, self._report = executor, config, job, note
        self._info, self._rng, self._steps = executor.info, np.random.default_rng(0), Steps(executor)
        with torch.inference_mode():
            fill(executor._rank.kv)  # type: ignore[attr-defined]

    def run(self) -> None:
        is_tiny = self._job["tiny"]
        if "decode" in self._job["parts"]:
            for batch in (1, 3) if is_tiny else (1, 32, 256):
                self.decode(batch, 24 if is_tiny else 1024, 6 if is_tiny else 60)
        # With dependent launch, a kernel's time includes its wait for the previous one.
        if "profile" in self._job["parts"] and not (self._job["dependent"] and self._job["device"] == "cuda"):
            for batch in (3,) if is_tiny else (1, 32, 256):
                self.profile(batch, 24 if is_tiny else 1024, 10)
        if "prefill" in self._job["parts"]:
            longest = min(8192, self._info.max_model_len)
            shapes = [(2, 16)] if is_tiny else sorted({(1, 512), (4, 2048), (1, longest)} - {(1, 2048)})
            for rows, count in shapes:
                if count <= self._info.max_model_len:
                    self.prefill(rows, count)

    def decode(self, batch: int, context: int, num_steps: int) -> None:
        """Measure steps of `batch` rows; the first ones are not counted."""
        name, warm = f"decode {batch} at {context}", max(4, num_steps // 4)
        blocks = self._blocks(name, batch, context + num_steps + warm)
        if blocks is None:
            return
        ends = list(self._decode(blocks, context, warm + num_steps))
        step_s = (ends[-1] - ends[warm - 1]) / num_steps
        longest_s = max(after - before for before, after in zip(ends[warm - 1 :], ends[warm:], strict=False))
        kv = batch * (context + warm + num_steps // 2) * self._info.block_bytes // self._info.block_size
        itemsize = getattr(torch, self._info.dtype).itemsize
        weights = sum(self._info.memory.get(kind, 0) for kind in ("weights", "weights as codes"))
        read = decode_bytes(self._config, weights, itemsize, batch) + kv
        self._report(
            name,
            step_ms=step_s * 1e3,
            longest_ms=longest_s * 1e3,
            tokens_per_s=batch / step_s,
            gb=read / 1e9,
            gb_per_s=read / step_s / 1e9,
        )

    def profile(self, batch: int, context: int, num_steps: int) -> None:
        """Report the time of each kernel in a step, longest first."""
        name, warm = f"profile {batch} at {context}", 4
        blocks = self._blocks(name, batch, context + num_steps + warm)
        if blocks is None:
            return
        steps = self._decode(blocks, context, warm + num_steps)
        for _ in range(warm):
            next(steps)
        is_cuda = self._job["device"] == "cuda"
        with profiler.profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
            for _ in steps:
                pass
        spans = [
            (event.self_device_time_total if is_cuda else event.self_cpu_time_total, event.count, event.key[:80])
            for event in found.key_averages()
        ]
        spans.sort(reverse=True)
        kernels = [
            {"kernel": key, "us": us / num_steps, "calls": count / num_steps} for us, count, key in spans[:NUM_KERNELS]
        ]
        self._report(
            name,
            busy_us=sum(us for us, _, _ in spans) / num_steps,
            launches=sum(count for _, count, _ in spans) / num_steps,
            kernels=kernels,
        )

    def _decode(self, blocks: np.ndarray, context: int, count: int) -> Iterator[float]:
        """Yield step times. The first step admits the requests directly at that position."""
        rows = [Row(slot, context - 1, 1, True, blocks=tuple(own)) for slot, own in enumerate(blocks.tolist())]
        self._steps.submit(self._prompts(len(blocks), context), rows)
        self._steps.collect()
        return self._steps.decode(len(blocks), context, count)

    def prefill(self, rows: int, count: int, num_steps: int = 5) -> None:
        """Measure steps of whole prompts; the first one is not counted."""
        name = f"prefill {rows} × {count}"
        blocks = self._blocks(name, rows, count)
        if blocks is None:
            return
        found = []
        for _ in range(num_steps + 1):
            prompts = self._prompts(rows, count)
            began_s = time.perf_counter()
            self._steps.prefill(blocks, prompts)
            found.append(time.perf_counter() - began_s)
        seconds = statistics.median(found[1:])
        self._report(name, step_ms=seconds * 1e3, tokens_per_s=rows * count / seconds)

    def _blocks(self, name: str, rows: int, length: int) -> np.ndarray | None:
        """Return blocks [rows, blocks per request] in random order, as after some time of serving; report and return
        None if the cache is too small."""
        each = -(-min(length + 1, self._info.max_model_len) // self._info.block_size)
        if rows * each >= self._info.num_blocks:
            has = f"{self._info.num_blocks} blocks of {self._info.block_bytes} bytes"
            self._report(name, skipped=f"the cache has only {has}")
            return None
        chosen = 1 + self._rng.permutation(self._info.num_blocks - 1)
        return chosen[: rows * each].reshape(rows, each)

    def _prompts(self, num: int, length: int) -> np.ndarray:
        return self._rng.integers(self._info.vocab_size, size=(num, length))
