"""From Prometheus text to rates, ratios and quantiles."""

import pytest

from penstock.engine.commands.top.figures import History, Look, Quantile, quantile

TEXT = """\
# HELP requests Requests, by "route".
# TYPE requests counter
requests_total{{route="/a",status="200"}} {good}
requests_total{{route="/b \\"x\\"\\n",status="500"}} {bad}
# TYPE wait histogram
wait_bucket{{le="0.5"}} {fast}
wait_bucket{{le="1.0"}} {all}
wait_bucket{{le="+Inf"}} {all}
# TYPE process_start_time_seconds gauge
process_start_time_seconds {start}
"""


def look(at_s: float, **values: float) -> Look:
    return Look.of(TEXT.format(**{"good": 0, "bad": 0, "fast": 0, "all": 0, "start": 1.0, **values}), at_s)


def history(*looks: Look) -> History:
    found = History()
    for each in looks:
        found.add(each)
    return found


def test_samples_are_summed_over_labels_or_told_apart_by_one() -> None:
    seen = look(0, good=3, bad=4)
    assert seen.total("requests_total") == 7 and seen.total("other") is None
    assert seen.by_label("requests_total", "status") == {"200": 3, "500": 4}
    assert seen.by_label("requests_total", "route") == {"/a": 3, '/b "x"\n': 4}


def test_a_rate_is_over_the_last_looks_and_unknown_after_the_first() -> None:
    assert history(look(0, good=5)).rate("requests_total") is None
    seen = history(*(look(at_s, good=at_s**2) for at_s in range(6)))
    assert seen.rate("requests_total") == (25 - 4) / 3


def test_looks_older_than_a_minute_are_forgotten_and_another_start_forgets_all() -> None:
    seen = history(*(look(at_s) for at_s in range(0, 100, 10)))
    assert [each.at_s for each in seen.looks] == [30, 40, 50, 60, 70, 80, 90]
    seen.add(look(100, start=2.0))
    assert [each.at_s for each in seen.looks] == [100]


def test_a_ratio_is_of_the_last_minute_if_anything_happened_then_and_else_of_all_time() -> None:
    grown = history(look(0, good=100, all=10), look(1, good=110, all=15))
    assert grown.ratio("requests_total", "wait_bucket") == 10 / 10
    still = history(look(0, good=100, all=10), look(1, good=100, all=10))
    assert still.ratio("requests_total", "wait_bucket") == 100 / 20
    assert history(look(0)).ratio("requests_total", "wait_bucket") is None


def test_a_histogram_is_of_the_last_minute() -> None:
    seen = history(look(0, fast=10, all=10), look(1, fast=13, all=18))
    assert seen.buckets("wait") == [(0.5, 3), (1.0, 5), (float("inf"), 0)]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, Quantile(None)),
        ((4, 0, 0), 0.5, Quantile(0.5, "<")),
        ((0, 4, 0), 0.5, Quantile(0.75)),
        ((2, 4, 2), 0.5, Quantile(0.75)),
        ((1, 0, 3), 0.99, Quantile(1.0, ">")),
    ],
)
def test_a_quantile_says_no_more_than_its_buckets(
    counts: tuple[int, int, int], share: float, expected: Quantile
) -> None:
    bounds = (0.5, 1.0, float("inf"))
    assert quantile(list(zip(bounds, counts, strict=True)), share) == expected


@pytest.mark.parametrize("text", ["<html>", "a b c d", 'x{y="'])
def test_what_is_no_exposition_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        Look.of(text, 0.0)
