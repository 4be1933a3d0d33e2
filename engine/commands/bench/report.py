"""The printed tables, in the shape that users of `vllm bench` know; built from the result that is saved."""

import json
from pathlib import Path
from typing import Any

from penstock.engine.commands.bench.summary import METRICS

PERCENTAGES = (10, 25, 50, 75, 90, 99)
_WIDTH = 50


def serving_table(result: dict[str, Any]) -> str:
    """What `penstock bench serve` prints. Metrics are shown as far as `result` has them."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(label, value) for label, value in _totals(result)]
    for name, (short, title) in METRICS.items():
        if f"mean_{name}_ms" in result:
            lines.append(title.center(_WIDTH, "-"))
            lines.append(_line(f"Mean {short} (ms):", float(result[f"mean_{name}_ms"])))
            lines.append(_line(f"Median {short} (ms):", float(result[f"median_{name}_ms"])))
            for key, value in result.items():
                if key.startswith("p") and key.endswith(f"_{name}_ms"):
                    percent = key.removesuffix(f"_{name}_ms")[1:]
                    lines.append(_line(f"P{percent} {short} (ms):", float(value)))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _totals(result: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if result["max_concurrency"] is not None:
        rows.append(("Maximum request concurrency:", result["max_concurrency"]))
    if result["request_rate"] != "inf":
        rows.append(("Request rate configured (RPS):", float(result["request_rate"])))
    rows.append(("Benchmark duration (s):", float(result["duration"])))
    rows.append(("Total input tokens:", result["total_input_tokens"]))
    if result["total_cached_tokens"]:
        rows.append(("Total input tokens found in cache:", result["total_cached_tokens"]))
    rows.append(("Total generated tokens:", result["total_output_tokens"]))
    rows.append(("Request throughput (req/s):", float(result["request_throughput"])))
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", float(result["request_goodput"])))
    return [
        *rows,
        ("Output token throughput (tok/s):", float(result["output_throughput"])),
        ("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"])),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", float(result["total_token_throughput"])),
        ("Latest send behind schedule (ms):", float(result["max_send_delay_ms"])),
    ]


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def percentiles(values: list[float]) -> dict[int, float]:
    import numpy as np

    return {percent: float(np.percentile(values, percent)) for percent in PERCENTAGES}


def write_json(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=4) + "\n")
