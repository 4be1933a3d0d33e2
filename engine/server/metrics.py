"""Counters and histograms under vLLM's names, so that existing dashboards and autoscalers can read them.

The tables map fields of the engine's `Stats` to metric names. Labels that clients can influence have a bounded set of
values (route templates and statuses); the set of tiers is fixed at the start. An observation costs a fraction of a
microsecond (a bisection), once per update and not per token; the text of /metrics is generated on request.
"""

import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from penstock.engine.front.answer import Answer, Update
from penstock.engine.front.engine import Engine
from penstock.engine.http.distribution import Distribution, ProcessMetrics, family
from penstock.engine.messages import MissReason, Outputs, Stats
from penstock.executor.protocol import ExpertUpdate

_VLLM_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
# All of vLLM's bounds, which begin at 0.3, plus smaller ones that show whether there is a queue.
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_VLLM_S)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences in the queue."),
}
COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens computed or found."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "forced_tokens": ("penstock:forced_tokens", "Generated tokens that a grammar left no choice about."),
    "num_drafts": ("penstock:spec_drafts", "Rows computed with drafts behind them."),
    "draft_tokens": ("penstock:spec_draft_tokens", "Draft tokens computed."),
    "accepted_tokens": ("penstock:spec_accepted_tokens", "Draft tokens that were accepted."),
}
EXPERT_COUNTERS = {
    "num_rebalances": ("rebalances", "Load checks after which experts were moved."),
    "num_reweights": ("reweights", "Load checks after which only the shares of an expert's copies were changed."),
    "num_skipped": ("rebalances_skipped", "Load checks after which nothing was changed."),
    "num_aborted": ("rebalances_aborted", "Rebalancings aborted; the previous placement stays in use."),
    "num_moved": ("moved", "Experts moved."),
    "moved_bytes": ("moved_bytes", "Bytes of experts sent between ranks."),
    "plan_s": ("plan_seconds", "Time spent planning, beside the steps."),
    "stall_s": ("stall_seconds", "Time that steps waited at their boundaries."),
}
# Tier figures that can decrease; all others are counters.
TIER_GAUGES = frozenset(
    {
        *("used_blocks", "capacity_blocks", "pinned_blocks", "queued_blocks", "loading_blocks", "storing_blocks"),
        "bytes_per_s",
        # figures of the disk tier
        *("capacity_bytes", "entries", "is_open", "loading", "pinned", "queue_bytes", "scan_left"),
        *("slots", "workers", "used_bytes"),
        # figures of the peer tier
        "served_clients",
    }
)


class ServerMetrics(ProcessMetrics):
    def __init__(self, model_name: str, engine: Engine) -> None:
        super().__init__()
        self.model_name = model_name
        self.engine = engine
        self.requests: Counter[tuple[str, int]] = Counter()  # (route template, status)
        self.refused: Counter[int] = Counter()  # status → connections that never became a request
        self.finished: Counter[str] = Counter()  # finish reason → sequences
        self.computed: Counter[str] = Counter()  # reason why they were not cached → prompt tokens
        self.first_token = Distribution(
            "vllm:time_to_first_token_seconds", "Submission to first token.", _FIRST_TOKEN_S
        )
        self.next_token = Distribution(
            "vllm:inter_token_latency_seconds", "Between two deliveries of tokens, per token.", _NEXT_TOKEN_S
        )
        self.whole = Distribution("vllm:e2e_request_latency_seconds", "Submission to last token.", _SECONDS)
        self.queued = Distribution("vllm:request_queue_time_seconds", "Waiting in the queue.", _SECONDS)
        self.prompt = Distribution("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generated = Distribution("vllm:request_generation_tokens", "Tokens of all choices of an answer.", _TOKENS)
        self.step = Distribution("vllm:iteration_tokens_total", "Positions computed by one engine step.", _TOKENS)
        engine.on_step = self._see_step

    def see(self, answer: Answer, updates: list[Update]) -> None:
        """Count the updates that have just been read from an answer."""
        longest = max(len(update.token_ids) for update in updates)
        if longest == 0:
            return
        # All times are arrival times, so that a slow reader does not count as the engine's latency.
        arrived_s, first_s = max(update.arrived_s for update in updates), answer.metrics.first_token_s
        if answer.read_s is None:
            self.first_token.observe(arrived_s if first_s is None else first_s)
        else:
            # The choices of a request advance in parallel, so divide by the length of the longest new piece.
            self.next_token.observe((arrived_s - answer.read_s) / longest)
        answer.read_s = arrived_s

    def end(self, answer: Answer) -> None:
        """Count an answer whose reader has finished or disconnected; unfinished choices count as aborted."""
        self.finished.update(answer.finish_reasons)
        self.finished["abort"] += len(answer.choices) - len(answer.finish_reasons)
        self.prompt.observe(answer.num_prompt_tokens)
        self.generated.observe(answer.num_tokens)
        if answer.reuse is not None:
            self.computed[answer.reuse.reason] += answer.num_prompt_tokens - answer.reuse.num_cached_tokens
        ended_s = answer.metrics.finished_s if answer.is_finished else None
        self.whole.observe(time.monotonic() - answer.started_s if ended_s is None else ended_s)
        if answer.metrics.queued_s is not None:
            self.queued.observe(answer.metrics.queued_s)

    def collect(self) -> Iterator[Metric]:
        model = self.model_name
        yield from stats_families(self.engine.stats, model)
        tokens, times = (self.prompt, self.generated, self.step), (self.first_token, self.next_token)
        for distribution in (*times, self.whole, self.queued, *tokens):
            yield distribution.family({"model_name": model})
        finished = [((model, reason), self.finished[reason]) for reason in ("stop", "length", "abort", "error")]
        text = "Sequences that ended, by reason."
        yield family(CounterMetricFamily, "vllm:request_success", text, ["model_name", "finished_reason"], finished)
        computed = [((model, reason), self.computed[reason]) for reason in get_args(MissReason)]
        text = "Prompt tokens that were computed, by the reason why the first of them was not cached."
        yield family(CounterMetricFamily, "penstock:prompt_tokens_computed", text, ["model_name", "reason"], computed)
        requests = [((route, str(status)), count) for (route, status), count in sorted(self.requests.items())]
        yield family(CounterMetricFamily, "penstock:http_requests", "HTTP requests.", ["route", "status"], requests)
        refused = [((str(status),), count) for status, count in sorted(self.refused.items())]
        text = "Connections refused before there was a request."
        yield family(CounterMetricFamily, "penstock:http_refused", text, ["status"], refused)

    def _see_step(self, outputs: Outputs) -> None:
        if outputs.step_tokens:
            self.step.observe(outputs.step_tokens)


def stats_families(stats: Stats, model: str) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for field, (name, text) in table.items():
            yield family(kind, name, text, ["model_name"], [((model,), getattr(stats, field))])
    share = stats.num_used_blocks / max(stats.num_blocks, 1)
    text = "Share of KV blocks in use, 0 to 1."
    yield family(GaugeMetricFamily, "vllm:kv_cache_usage_perc", text, ["model_name"], [((model,), share)])
    states = {"all": stats.num_blocks, "held": stats.num_used_blocks, "cached": stats.num_cached_blocks}
    rows = [((model, state), count) for state, count in states.items()]
    text = "KV blocks of the device: all, held by requests, and with content that can be found again."
    yield family(GaugeMetricFamily, "penstock:kv_device_blocks", text, ["model_name", "state"], rows)
    steps = SummaryMetricFamily("penstock:step_seconds", "Time of the engine's steps.", labels=["model_name"])
    steps.add_metric([model], stats.num_steps, stats.step_s)
    yield steps
    yield from _tier_families(stats.tiers, model)
    if stats.experts is not None:
        yield from _expert_families(stats.experts, model)


def _tier_families(tiers: Mapping[str, Mapping[str, float]], model: str) -> Iterator[Metric]:
    for figure in sorted({figure for values in tiers.values() for figure in values}):
        kind = GaugeMetricFamily if figure in TIER_GAUGES else CounterMetricFamily
        text = figure.replace("_", " ").capitalize() + " of a cache tier."
        rows = [((model, tier), values[figure]) for tier, values in tiers.items() if figure in values]
        yield family(kind, f"penstock:kv_tier_{figure}", text, ["model_name", "tier"], rows)


def _expert_families(update: ExpertUpdate, model: str) -> Iterator[Metric]:
    """Yield the balance of expert load over the ranks, and the costs of moving experts."""
    text = "Mean load of the ranks divided by the largest load of a rank, mean over the layers."
    yield family(GaugeMetricFamily, "penstock:expert_balance", text, ["model_name"], [((model,), update.balance)])
    for name, of, shares in (("rank_load", "rank", update.rank_load), ("load", "expert", update.expert_load)):
        text = f"Share of the experts' tokens at the last check of the load, by {of}; all layers together."
        rows = [((model, str(place)), share) for place, share in enumerate(array("f", shares))]
        yield family(GaugeMetricFamily, f"penstock:expert_{name}", text, ["model_name", of], rows)
    for field, (name, text) in EXPERT_COUNTERS.items():
        figure = getattr(update, field)
        yield family(CounterMetricFamily, f"penstock:expert_{name}", text, ["model_name"], [((model,), figure)])
