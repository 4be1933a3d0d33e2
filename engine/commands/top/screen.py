"""The two views as lines of text: of a server, and of a router with its replicas.

A line is a list of pieces, so that it can be coloured, or cut to the width, without counting what is not seen. What
a server said is cleaned of control characters: a name must not steer the user's terminal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.engine.commands.top.figures import History, Look, Quantile, quantile

BAR = 32
LEVELS = " ▁▂▃▄▅▆▇█"
LATENCIES = {
    "first token": "vllm:time_to_first_token_seconds",
    "between tokens": "vllm:inter_token_latency_seconds",
    "whole request": "vllm:e2e_request_latency_seconds",
    "in the queue": "vllm:request_queue_time_seconds",
}
ROUTER_LATENCIES = {
    "first byte": "penstock:router_first_byte_seconds",
    "lag of the loop": "penstock:router_loop_lag_seconds",
}
PROMPTS = "penstock:router_compared_prompt_tokens_total"
COLUMNS = ("replica", "state", "in flight", "queued", "prefill tok/s", "cached", "requests", "failures", "ejections")


class Span(NamedTuple):
    text: str
    style: str = ""  # "", "soft", "strong", "accent" or "alarm"


Line = list[Span]


def server_lines(history: History) -> Iterator[Line]:
    now = history.now
    yield from _pairs(
        ("running", number(now.total("vllm:num_requests_running")), ""),
        ("generated", number(history.rate("vllm:generation_tokens_total")), "tok/s"),
        ("prefix hits", percent(history.ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")), ""),
        ("waiting", number(now.total("vllm:num_requests_waiting")), ""),
        ("prompts", number(history.rate("vllm:prompt_tokens_total")), "tok/s"),
        ("step", seconds(history.ratio("penstock:step_seconds_sum", "penstock:step_seconds_count")), ""),
    )
    yield []
    yield [Span("KV blocks", "strong")]
    yield from _tiers(now)
    yield []
    yield from _latencies(history, LATENCIES)
    yield from _experts(now)
    yield []
    ends = now.by_label("vllm:request_success_total", "finished_reason")
    yield from _counts(
        [
            ("tokens", now.total("vllm:generation_tokens_total")),
            ("prompt tokens", now.total("vllm:prompt_tokens_total")),
            ("steps", now.total("penstock:step_seconds_count")),
            *ends.items(),
            ("preemptions", now.total("vllm:num_preemptions_total")),
        ]
    )


def router_lines(history: History, replicas: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    now = history.now
    yield from _pairs(
        ("in flight", number(now.total("penstock:router_under_way")), ""),
        ("overlap predicted", percent(history.ratio("penstock:router_predicted_cached_tokens_total", PROMPTS)), ""),
        ("retries", number(now.total("penstock:router_retries_total") or 0), ""),
        ("placed", number(history.rate("penstock:router_decisions_total"), 1), "/s"),
        ("overlap measured", percent(history.ratio("penstock:router_actual_cached_tokens_total", PROMPTS)), ""),
        ("ejections", number(now.total("penstock:router_replica_ejections_total") or 0), ""),
    )
    yield []
    yield from _table([COLUMNS, *map(_replica, replicas)])
    yield []
    yield from _latencies(history, ROUTER_LATENCIES)
    yield []
    answers = now.by_label("penstock:router_requests_total", "status")
    yield from _counts(
        [
            *((f"answers with {status}", count) for status, count in answers.items()),
            ("broken streams", now.total("penstock:router_broken_streams_total")),
            ("clients that left", now.total("penstock:router_client_gone_total")),
        ]
    )


def clean(text: object) -> str:
    """Printable characters of what a server said; all others as one that stands for any."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.{1 if 0 < value < 0.01 else 0}f} ms"
    return f"{value:.{2 if value < 10 else 0}f} s"


def bar(share: float, behind: float = 0.0) -> Line:
    """`share` of a bar, and behind it, paler, as far as `behind`."""
    front = round(BAR * min(max(share, 0.0), 1.0))
    back = max(round(BAR * min(max(behind, 0.0), 1.0)) - front, 0)
    return [Span("█" * front, "accent"), Span("▒" * back, "accent"), Span("·" * (BAR - front - back), "soft")]


def levels(values: Iterable[float]) -> str:
    """Small columns, the highest one full; what is not nothing is seen."""
    found = list(values)
    highest = max(found, default=0.0)
    return "".join(LEVELS[0 if value <= 0 else max(round(8 * value / highest), 1)] for value in found)


def _pairs(*pairs: tuple[str, str, str]) -> Iterator[Line]:
    for start in range(0, len(pairs), 3):
        line: Line = []
        for name, value, unit in pairs[start : start + 3]:
            line += [Span(f"{name:<18}", "soft"), Span(f"{value:>7}", "strong"), Span(f" {unit:<7}", "soft")]
        yield line


def _tiers(now: Look) -> Iterator[Line]:
    states = now.by_label("penstock:kv_device_blocks", "state")
    whole = states.get("all") or 1.0
    held, cached = states.get("held", 0.0), states.get("cached", 0.0)
    words = f"{number(held)} held, {number(cached)} cached of {number(states.get('all'))}"
    yield [Span(f"{'device':<8}"), *bar(held / whole, cached / whole), Span(f"  {words}")]
    capacity = now.by_label("penstock:kv_tier_capacity_blocks", "tier")
    for tier, used in now.by_label("penstock:kv_tier_used_blocks", "tier").items():
        room = capacity.get(tier)
        words = f"{number(used)} of {number(room)}" if room else f"{number(used)} blocks"
        yield [Span(f"{clean(tier):<8}"), *bar(used / room if room else 0.0), Span(f"  {words}")]


def _latencies(history: History, names: Mapping[str, str]) -> Iterator[Line]:
    title = "Latency, last minute" if len(history.looks) > 1 else "Latency, since the start"
    yield [
        Span(f"{title:<24}", "strong"),
        Span("".join(f"{word:>10}" for word in ("p50", "p95", "p99", "count")), "soft"),
    ]
    for label, name in names.items():
        buckets = history.buckets(name)
        shown = "".join(f"{_quantile(quantile(buckets, share)):>10}" for share in (0.5, 0.95, 0.99))
        count = sum(count for _, count in buckets)
        columns = levels(count for _, count in buckets)
        yield [Span(f"{label:<24}{shown}{number(count):>10}   "), Span(columns, "accent")]


def _quantile(found: Quantile) -> str:
    return f"{found.sign} {seconds(found.value)}".strip()


def _experts(now: Look) -> Iterator[Line]:
    balance = now.total("penstock:expert_balance")
    if balance is None:
        return
    ranks = now.by_label("penstock:expert_rank_load", "rank")
    yield []
    yield [Span("Ranks", "strong"), Span(f"  balance {percent(balance)}", "soft")]
    highest = max(ranks.values(), default=1.0) or 1.0
    for rank, share in ranks.items():
        yield [Span(f"{clean(rank):<8}"), *bar(share / highest), Span(f"  {percent(share)}")]
    loads = now.by_label("penstock:expert_load", "expert").values()
    yield [Span("experts "), Span(levels(loads), "accent")]


def _counts(pairs: Iterable[tuple[str, float | None]]) -> Iterator[Line]:
    words = [f"{clean(name)} {number(value or 0)}" for name, value in pairs]
    for start in range(0, len(words), 4):
        title = "" if start else "Since the start"
        yield [Span(f"{title:<18}", "strong"), Span("   ".join(words[start : start + 4]), "soft")]


def _replica(replica: Mapping[str, Any]) -> tuple[str, ...]:
    placement = replica.get("brain") or {}
    cached = placement.get("cached_blocks") or {}
    state = clean(replica["state"])
    return (
        clean(replica["url"]),
        state if state == "up" else f"{state} ({clean(replica['reason'])[:40]})",
        number(replica["requests_under_way"]),
        number(placement.get("queued_tokens")),
        number(placement.get("prefill_tokens_per_s")),
        " ".join(f"{number(count)} {clean(tier)}" for tier, count in cached.items() if count) or "–",
        number(replica["requests"]),
        number(replica["failures"]),
        number(replica["ejections"]),
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """The first two columns to the left, figures to the right; a replica that is not up in the colour of alarm."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for place, row in enumerate(rows):
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        style = "soft" if place == 0 else "" if row[1] == "up" else "alarm"
        yield [Span("  ".join(cells), style)]
