"""Summarizes the requests of a serving benchmark: throughput and latency percentiles.

The result is one flat dictionary with the keys of `vllm bench serve`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


class Outcome(msgspec.Struct):
    """One finished request. `start_s` is when it was sent, on any clock; the other times are durations."""

    prompt_len: int
    output_len: int
    start_s: float
    ttft_s: float
    latency_s: float
    itls_s: list[float] = []  # between pieces of the stream; a piece may carry several tokens
    num_cached: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 where there is only one."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0


def spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and 99th percentile in milliseconds, under keys like `p99_ttft_ms`."""
    import numpy as np  # the options of a benchmark are shown without it

    values = 1000 * np.array(values_s or [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def summarize(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Return the whole result. Failed requests count only as failed."""
    done = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.prompt_len for outcome in done)
    num_output = sum(outcome.output_len for outcome in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(outcome.num_cached for outcome in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    values = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done if outcome.output_len > 1],
        "itl": [gap for outcome in done for gap in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in done],
    }
    for name in METRICS:
        result |= spread(name, values[name])
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return lists with one entry per request."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
