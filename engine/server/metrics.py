"""Counters and histograms under vLLM's names, so that existing dashboards and autoscalers can read them.

metrics.json has their names and HELP texts. Labels that clients can influence have a bounded set of values (route
templates and statuses); the set of tiers is fixed at the start. An observation costs a fraction of a microsecond (a
bisection), once per update and not per token; the text of /metrics is generated on request.
"""

import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client.core import Metric, SummaryMetricFamily

from penstock.engine.front.answer import Answer, Update
from penstock.engine.front.engine import Engine
from penstock.engine.http.distribution import Distribution, HistogramRow, MetricRow, ProcessMetrics, family
from penstock.engine.messages import MissReason, Outputs, Stats
from penstock.executor.protocol import AdapterInfo, ExpertUpdate


class MetricTable(msgspec.Struct, frozen=True):
    """The metrics of metrics.json."""

    engine: dict[str, MetricRow]  # by field of `Stats`
    experts: dict[str, MetricRow]  # by field of `ExpertUpdate`
    tiers: dict[str, MetricRow]  # by figure; figures that end with a reason begin with an entry that ends with _
    labelled: dict[str, MetricRow]
    # The bounds of seconds are vLLM's, which begin at 0.3, plus smaller ones that show whether there is a queue.
    histograms: dict[str, HistogramRow]


METRICS = msgspec.json.decode(Path(__file__).with_name("metrics.json").read_bytes(), type=MetricTable)


class ServerMetrics(ProcessMetrics):
    def __init__(self, model_name: str, engine: Engine, adapters: Mapping[str, AdapterInfo]) -> None:
        """`adapters`: those that are served, by name."""
        super().__init__()
        self.model_name = model_name
        self.engine, self._adapters = engine, adapters
        self._used_adapters: list[list[str]] = [[], []]  # keys of those that run, and of those that wait …
        self._used_since = time.time()  # … as they are since then
        self.requests: Counter[tuple[str, int]] = Counter()  # (route template, status)
        self.refused: Counter[int] = Counter()  # status → connections that never became a request
        self.finished: Counter[str] = Counter()  # finish reason → sequences
        self.computed: Counter[str] = Counter()  # reason why they were not cached → prompt tokens
        self.histograms = {name: Distribution(*row) for name, row in METRICS.histograms.items()}
        engine.on_step = self._see_step

    def see(self, answer: Answer, updates: list[Update]) -> None:
        """Count the updates that have just been read from an answer."""
        longest = max(len(update.token_ids) for update in updates)
        if longest == 0:
            return
        # All times are arrival times, so that a slow reader does not count as the engine's latency.
        arrived_s, first_s = max(update.arrived_s for update in updates), answer.metrics.first_token_s
        if answer.read_s is None:
            self.histograms["first_token"].observe(arrived_s if first_s is None else first_s)
        else:
            # The choices of a request advance in parallel, so divide by the length of the longest new piece.
            self.histograms["next_token"].observe((arrived_s - answer.read_s) / longest)
        answer.read_s = arrived_s

    def end(self, answer: Answer) -> None:
        """Count an answer whose reader has finished or disconnected; unfinished choices count as aborted."""
        self.finished.update(answer.finish_reasons)
        self.finished["abort"] += len(answer.choices) - len(answer.finish_reasons)
        self.histograms["prompt"].observe(answer.num_prompt_tokens)
        self.histograms["generated"].observe(answer.num_tokens)
        if answer.reuse is not None:
            self.computed[answer.reuse.reason] += answer.num_prompt_tokens - answer.reuse.num_cached_tokens
        longest = max(choice.num_tokens for choice in answer.choices)
        self.histograms["longest"].observe(longest)
        queued_s, first_s = answer.metrics.queued_s, answer.metrics.first_token_s
        ended_s = answer.metrics.finished_s if answer.is_finished else None
        self.histograms["whole"].observe(time.monotonic() - answer.started_s if ended_s is None else ended_s)
        if queued_s is not None:
            self.histograms["queued"].observe(queued_s)
        if queued_s is not None and first_s is not None:
            self.histograms["prefill"].observe(max(0.0, first_s - queued_s))
        if ended_s is not None and first_s is not None:
            self.histograms["decode"].observe(ended_s - first_s)
            if longest > 1:
                self.histograms["per_token"].observe((ended_s - first_s) / (longest - 1))

    def collect(self) -> Iterator[Metric]:
        model, rows = self.model_name, METRICS.labelled
        yield from stats_families(self.engine.stats, model)
        info = self.engine.info
        cache = str(info.block_bytes), str(info.block_size), str(info.num_blocks)
        yield family(rows["cache"], [(cache, 1)])
        if info.max_loras:
            names = {info.key: name for name, info in self._adapters.items()}
            used = (",".join(names[key] for key in keys if key in names) for keys in self._used_adapters)
            yield family(rows["adapters"], [((str(info.max_loras), *used), self._used_since)])
        for distribution in self.histograms.values():
            yield distribution.family({"model_name": model})
        reasons = ("stop", "length", "abort", "error")
        yield family(rows["finished"], [((model, reason), self.finished[reason]) for reason in reasons])
        misses = get_args(MissReason)
        yield family(rows["computed"], [((model, reason), self.computed[reason]) for reason in misses])
        requests = [((route, str(status)), count) for (route, status), count in sorted(self.requests.items())]
        yield family(rows["requests"], requests)
        yield family(rows["refused"], [((str(status),), count) for status, count in sorted(self.refused.items())])

    def _see_step(self, outputs: Outputs) -> None:
        if outputs.step_tokens:
            self.histograms["step"].observe(outputs.step_tokens)
        if outputs.stats.adapters not in ([], self._used_adapters):
            self._used_adapters, self._used_since = outputs.stats.adapters, time.time()


def stats_families(stats: Stats, model: str) -> Iterator[Metric]:
    for field, row in METRICS.engine.items():
        yield family(row, [((model,), getattr(stats, field))])
    by_place = [((model, str(place)), count) for place, count in enumerate(stats.accepted_at)]
    yield family(METRICS.labelled["accepted_at"], by_place)
    share = stats.num_used_blocks / max(stats.num_blocks, 1)
    yield family(METRICS.labelled["kv_usage"], [((model,), share)])
    states = {"all": stats.num_blocks, "held": stats.num_used_blocks, "cached": stats.num_cached_blocks}
    yield family(METRICS.labelled["device_blocks"], [((model, state), count) for state, count in states.items()])
    steps = SummaryMetricFamily("penstock:step_seconds", "Seconds that the engine's steps took.", labels=["model_name"])
    steps.add_metric([model], stats.num_steps, stats.step_s)
    yield steps
    yield from _tier_families(stats.tiers, model)
    if stats.experts is not None:
        yield from _expert_families(stats.experts, model)


def _tier_families(tiers: Mapping[str, Mapping[str, float]], model: str) -> Iterator[Metric]:
    for figure in sorted({figure for values in tiers.values() for figure in values}):
        samples = [((model, tier), values[figure]) for tier, values in tiers.items() if figure in values]
        yield family(_tier_row(figure), samples)


def _tier_row(figure: str) -> MetricRow:
    """Return the row of a figure. Where that names the start of figures, the reason completes its name and its text."""
    row = METRICS.tiers.get(figure)
    if row is not None:
        return row
    start = next(name for name in METRICS.tiers if name.endswith("_") and figure.startswith(name))
    row, reason = METRICS.tiers[start], figure.removeprefix(start)
    return row._replace(name=row.name + reason, text=f"{row.text} {reason.replace('_', ' ')}.")


def _expert_families(update: ExpertUpdate, model: str) -> Iterator[Metric]:
    """Yield the balance of expert load over the ranks, and the costs of moving experts."""
    yield family(METRICS.labelled["balance"], [((model,), update.balance)])
    for name in ("rank_load", "expert_load"):
        shares = array("f", getattr(update, name))
        yield family(METRICS.labelled[name], [((model, str(place)), share) for place, share in enumerate(shares)])
    for field, row in METRICS.experts.items():
        yield family(row, [((model,), getattr(update, field))])
