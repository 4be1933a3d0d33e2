"""The results of benchmarks: summarized requests of a server with the keys of `vllm bench serve`, tables in the format of
`vllm bench`, and files."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.config import ConfigError

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


PERCENTAGES = (10, 25, 50, 75, 90, 99)
_WIDTH = 50
CACHED = "total_cached_tokens"
_TOTALS: tuple[tuple[str, str, type[int] | type[float]], ...] = (
    ("Successful requests:", "completed", int),
    ("Failed requests:", "failed", int),
    ("Maximum request concurrency:", "max_concurrency", int),
    ("Request rate configured (RPS):", "request_rate", float),
    ("Benchmark duration (s):", "duration", float),
    ("Total input tokens:", "total_input_tokens", int),
    ("Total input tokens found in cache:", CACHED, int),
    ("Total generated tokens:", "total_output_tokens", int),
    ("Request throughput (req/s):", "request_throughput", float),
    ("Output token throughput (tok/s):", "output_throughput", float),
    ("Total token throughput (tok/s):", "total_token_throughput", float),
    ("Latest send behind schedule (ms):", "max_send_delay_ms", float),
)


def serving_table(result: dict[str, Any]) -> str:
    """Return the table of `penstock bench serve`."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    # Values that were not requested or did not occur are left out.
    shown = {key: value for key, value in result.items() if value not in (None, "inf") and (key, value) != (CACHED, 0)}
    lines += [_line(label, kind(shown[key])) for label, key, kind in _TOTALS if key in shown]
    for name, (short, title) in METRICS.items():
        lines.append(title.center(_WIDTH, "-"))
        lines.append(_line(f"Mean {short} (ms):", float(result[f"mean_{name}_ms"])))
        lines.append(_line(f"Median {short} (ms):", float(result[f"median_{name}_ms"])))
        lines.append(_line(f"P99 {short} (ms):", float(result[f"p99_{name}_ms"])))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def percentiles(values: list[float]) -> dict[int, float]:
    import numpy as np

    return {percent: float(np.percentile(values, percent)) for percent in PERCENTAGES}


def output_file(name: str) -> str:
    """Return the name; refuse a file that cannot be written, before minutes are spent on the measurement."""
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name} cannot be written; a file in an existing folder is expected")
    return name


def write_json(name: str | None, result: dict[str, Any]) -> None:
    """Write the result, if a file was named; print it if it cannot be written after all, so that it is not lost."""
    if name is None:
        return
    text = json.dumps(result, indent=4)
    try:
        Path(name).write_text(text + "\n")
    except OSError as error:
        print(text, flush=True)
        raise ConfigError(f"{name} cannot be written: {error.strerror}; the result is printed") from None
