"""Prints results as tables in the format of `vllm bench`, and writes them to files."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from penstock.engine.commands.bench.summary import METRICS
from penstock.engine.config import ConfigError

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
