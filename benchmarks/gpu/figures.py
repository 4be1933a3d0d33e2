"""How a part reports figures, and how a call on a device is timed."""

import json
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.pairs import MARK

WARM_S = 0.1  # after a large cache was filled, the first 50 ms of calls are up to 15 % slower on an H100
# Read between two calls, so that no call finds its input in the cache. Writing would leave lines that the call has to
# write back while it is measured.
FLUSH_BYTES = 256 << 20


def report(name: str, prefix: str = "", **figures: Any) -> None:
    """Print a figure of the part; the parent process collects these lines from all output."""
    print(f"{MARK}{json.dumps({'name': prefix + name, **figures}, ensure_ascii=False)}", flush=True)


def open_device(job: dict[str, Any]) -> torch.device:
    """Return the job's device; exit with a message on a machine without it."""
    if job["device"] == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU")
    return torch.device(job["device"])


def set_launch(job: dict[str, Any]) -> None:
    """Set whether kernels that are launched or captured from now on may start early."""
    if job["device"] == "cuda":
        from penstock.executor.kernels.cuda import launch

        launch.USES_DEPENDENT_LAUNCH = job["dependent"]


class Timer:
    """Measures the device seconds of a call, as the median of several. On a GPU the call is captured into a graph
    first, so that the host's launch time is not counted; the call must not synchronize with the device. The time of an
    empty graph, which is the latency between events and graph, is subtracted."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, dtype=torch.int32, device=device)
        self._empty_s: float | None = None
        self._warm_s = 1.0  # before the first call: the clock of an idle H100 is a sixth of its highest

    def seconds(self, call: Callable[[], object]) -> float:
        if self._device.type == "cuda":
            return self._on_gpu(call)
        call()
        return statistics.median(timeit.repeat(call, number=1, repeat=self._repeats))

    def _on_gpu(self, call: Callable[[], object]) -> float:
        for _ in range(3):  # compiles, and fills the allocator
            call()
        torch.cuda.synchronize()
        if self._empty_s is None:
            self._empty_s = self._replay_s(lambda: None)
        return self._replay_s(call) - self._empty_s

    def _replay_s(self, call: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        warm_until_s = time.perf_counter() + self._warm_s
        self._warm_s = WARM_S
        while time.perf_counter() < warm_until_s:
            graph.replay()
            torch.cuda.synchronize()
        spans = []
        for _ in range(self._repeats):
            self._flush.sum()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in spans)) / 1e3


def ceilings(timer: Timer, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> tuple[float, float]:
    """Measure and report the bytes per second of a read, and the operations per second of a product of square matrices.
    A copy is no ceiling for kernels that mostly read: it writes as much as it reads, which is slower."""
    source = torch.ones(1 << 14 if is_tiny else 1 << 29, dtype=torch.int32, device=device)
    read = source.nbytes / timer.seconds(source.sum)
    side = 64 if is_tiny else 8192
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    product = 2 * side**3 / timer.seconds(lambda: a @ b)
    report("read", gb_per_s=read / 1e9)
    report("matrix product", tflop_per_s=product / 1e12)
    return read, product
