"""The results of benchmarks: summarized requests of a server with the keys of `vllm bench serve`, tables in the format of
`vllm bench`, and files."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev, quantiles
from typing import Any

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.config import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50
_TOTALS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_cached_tokens": "Total input tokens found in cache:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total token throughput (tok/s):",
    "max_send_delay_ms": "Latest send behind schedule (ms):",
}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile with linear interpolation, as numpy does."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and 99th percentile in milliseconds, under keys like `p99_ttft_ms`."""
    values = [1000 * value for value in values_s] or [0.0]
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": pstdev(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


def summarize(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Return the whole result. Failed requests count only as failed."""
    done = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.prompt_len for outcome in done)
    num_output = sum(outcome.output_len for outcome in done)
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(outcome.num_cached for outcome in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        **spread("ttft", [outcome.ttft_s for outcome in done]),
        **spread("tpot", [outcome.tpot_s for outcome in done if outcome.output_len > 1]),
        **spread("itl", [gap for outcome in done for gap in outcome.itls_s]),
        **spread("e2el", [outcome.latency_s for outcome in done]),
    }


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


def serving_table(result: dict[str, Any]) -> str:
    """Return the table of `penstock bench serve`."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(label, result[key]) for key, label in _TOTALS.items() if result[key] not in (None, "inf")]
    for name, (short, title) in METRICS.items():
        lines.append(title.center(_WIDTH, "-"))
        lines += [
            _line(f"{kind.title()} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind in ("mean", "median", "p99")
        ]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


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
