"""The results of benchmarks: summarized requests of a server with the keys of `vllm bench serve`, tables in the format of
`vllm bench`, and files."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.config import ConfigError
from penstock.engine.options import flag

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
METRICS: dict[str, tuple[str, str]] = _TABLE["metrics"]
GOAL_METRICS = ("ttft", "tpot", "e2el")  # those that each request has one value of
_WIDTH = 50
_TOTALS: dict[str, str] = _TABLE["totals"]


class Goal(NamedTuple):
    """A limit that a request must meet to count for the goodput."""

    metric: str
    limit_ms: float


def output_file(name: str) -> str:
    """Return the name; refuse a file that cannot be written, before minutes are spent on the measurement."""
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name} cannot be written; a file in an existing folder is expected")
    return name


def _metric_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= METRICS.keys():
        raise ValueError(f"{text!r} given; names of {', '.join(METRICS)} are expected, separated by commas")
    return names


def _number(text: str) -> float:
    """Return a number; NaN, which is within no limits, for another text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _percents(text: str) -> list[float]:
    percents = [_number(part) for part in text.split(",")]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ValueError(f"{text!r} given; numbers between 0 and 100 are expected, separated by commas")
    return percents


def _goal(text: str) -> Goal:
    metric, _, limit = text.partition(":")
    limit_ms = _number(limit)
    if metric not in GOAL_METRICS or not 0 <= limit_ms < math.inf:
        expected = f"one of {', '.join(GOAL_METRICS)} and a limit in milliseconds, like ttft:200, is expected"
        raise ValueError(f"{text!r} given; {expected}")
    return Goal(metric, limit_ms)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    percentile_metrics: tuple[str, ...] = flag(tuple(METRICS), read=_metric_names)
    metric_percentiles: tuple[float, ...] = flag((99.0,), read=_percents)
    goodput: tuple[Goal, ...] = flag((), read=_goal)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    output_json: str | None = flag(read=output_file)

    def prepare(self) -> None:
        """Create the folder of the saved result; raise ConfigError if the result could not be written there."""
        for name in ("save_detailed", "result_dir", "result_filename"):
            if getattr(self, name) and not self.save_result:
                raise ConfigError(f"{name}: given; it requires --save-result")
        if not self.save_result:
            return
        folder = Path(self.result_dir or ".")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            output_file(str(folder / (self.result_filename or "result.json")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"result_dir: {error}") from None

    def save(self, result: dict[str, Any]) -> None:
        write_json(self.output_json, result)
        if self.save_result:
            path = Path(self.result_dir or ".") / (self.result_filename or _default_name(result))
            dropped = () if self.save_detailed else details(()).keys()
            write_json(str(path), {name: value for name, value in result.items() if name not in dropped})


def _default_name(result: dict[str, Any]) -> str:
    limit = result["max_concurrency"]
    load = f"{result['request_rate']}qps" + (f"-concurrency{limit}" if limit is not None else "")
    return f"{result['backend']}-{load}-{result['model_id'].split('/')[-1]}-{result['date']}.json"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation, as numpy does."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    return ordered[below] + (ordered[math.ceil(position)] - ordered[below]) * (position - below)


def spread(name: str, values_s: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in milliseconds, under keys like `p99_ttft_ms`."""
    values = [1000 * value for value in values_s] or [0.0]
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": pstdev(values),
        **{f"p{percent:.15g}_{name}_ms": percentile(values, percent) for percent in percents},
    }


def meets(outcome: Outcome, goals: Sequence[Goal]) -> bool:
    times_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.latency_s}
    return all(1000 * times_s[goal.metric] <= goal.limit_ms for goal in goals)


def summarize(
    outcomes: Sequence[Outcome], duration_s: float, options: ReportOptions = ReportOptions()
) -> dict[str, Any]:
    """Return the whole result. Failed requests count only as failed."""
    done = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.prompt_len for outcome in done)
    num_output = sum(outcome.output_len for outcome in done)
    num_good = sum(meets(outcome, options.goodput) for outcome in done)
    times_s = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done if outcome.output_len > 1],
        "itl": [gap for outcome in done for gap in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in done],
    }
    result = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(outcome.num_cached for outcome in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": num_good / duration_s if options.goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    for name in METRICS:
        if name in options.percentile_metrics:
            result |= spread(name, times_s[name], options.metric_percentiles)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return lists with one entry per request."""
    return {key: [getattr(outcome, name) for outcome in outcomes] for key, name in _TABLE["details"].items()}


def serving_table(result: dict[str, Any]) -> str:
    """Return the table of `penstock bench serve`."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(label, result[key]) for key, label in _TOTALS.items() if result[key] not in (None, "inf")]
    for name, (short, title) in METRICS.items():
        kinds = re.findall(rf"^(mean|median|p[\d.]+)_{name}_ms$", "\n".join(result), re.MULTILINE)
        if kinds:
            lines.append(title.center(_WIDTH, "-"))
        lines += [_line(f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind in kinds]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


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
