"""Counters and histograms under vLLM's names, so that existing dashboards and autoscalers read them.

Everything labelled by what a client can choose has a bounded set of values: route templates and statuses.
Observing costs a fraction of a microsecond (a bisection), once per update and not per token; the text of
/metrics is put together on request.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.front.answer import Answer, Update
from penstock.engine.front.client import AsyncEngine
from penstock.engine.messages import Outputs
from penstock.engine.server.families import family, stats_families

_VLLM_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
# vLLM's begin at 0.3: those before them show whether there is a queue. All of its bounds are there.
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_VLLM_S)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Distribution:
    """Counts per bucket. `bounds` are upper limits, the last bucket is open."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, model_name: str) -> HistogramMetricFamily:
        buckets, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        found = HistogramMetricFamily(self.name, self.help_text, labels=["model_name"])
        found.add_metric([model_name], buckets, sum_value=self.total)
        return found


class ServerMetrics(Collector):
    def __init__(self, model_name: str, engine: AsyncEngine) -> None:
        self.model_name = model_name
        self.engine = engine
        self.requests: Counter[tuple[str, int]] = Counter()  # (route template, status)
        self.refused: Counter[int] = Counter()  # status → connections that never became a request
        self.finished: Counter[str] = Counter()  # finish reason → sequences
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
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        engine.on_step = self._see_step

    def see(self, answer: Answer, updates: list[Update]) -> None:
        """What has just been read of an answer."""
        num_tokens = 0
        for update in updates:
            num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                self.finished[update.finish_reason] += 1
        if num_tokens == 0:
            return
        # All times are those of arrival: a reader that is slow is not the engine's delay.
        arrived_s, first_s = max(update.arrived_s for update in updates), answer.metrics.first_token_s
        if answer.read_s is None:
            self.first_token.observe(arrived_s if first_s is None else first_s)
        else:
            # Choices of one request advance side by side, so the gap is that of the longest new piece.
            longest = max(len(update.token_ids) for update in updates)
            self.next_token.observe((arrived_s - answer.read_s) / longest)
        answer.read_s = arrived_s

    def end(self, answer: Answer) -> None:
        """The reader is done or gone; choices whose end it has not read were aborted."""
        self.finished["abort"] += len(answer.choices) - answer.num_finished
        self.prompt.observe(answer.num_prompt_tokens)
        self.generated.observe(answer.num_tokens)
        ended_s = answer.metrics.finished_s if answer.is_finished else None
        self.whole.observe(time.monotonic() - answer.started_s if ended_s is None else ended_s)
        if answer.metrics.queued_s is not None:
            self.queued.observe(answer.metrics.queued_s)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        model = self.model_name
        yield from stats_families(self.engine.stats, model)
        tokens, times = (self.prompt, self.generated, self.step), (self.first_token, self.next_token)
        for distribution in (*times, self.whole, self.queued, *tokens):
            yield distribution.family(model)
        finished = [((model, reason), self.finished[reason]) for reason in ("stop", "length", "abort", "error")]
        text = "Sequences that ended, by reason."
        yield family(CounterMetricFamily, "vllm:request_success", text, ["model_name", "finished_reason"], finished)
        requests = [((route, str(status)), count) for (route, status), count in sorted(self.requests.items())]
        yield family(CounterMetricFamily, "penstock:http_requests", "HTTP requests.", ["route", "status"], requests)
        refused = [((str(status),), count) for status, count in sorted(self.refused.items())]
        text = "Connections refused before there was a request."
        yield family(CounterMetricFamily, "penstock:http_refused", text, ["status"], refused)

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not collect: the engine may not have said anything yet

    def _see_step(self, outputs: Outputs) -> None:
        if outputs.step_tokens:
            self.step.observe(outputs.step_tokens)
