"""The metrics that `penstock prove` reads are those that the server's library writes."""

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.prove.metrics import Metrics


def written() -> str:
    registry = CollectorRegistry()
    Counter("tokens", "with a \\ and\na line", ["model"], registry=registry).labels('a "}model\\" \n').inc(3)
    Gauge("blocks", "", ["state"], registry=registry).labels("held").set(math.inf)
    Gauge("blocks_used", "", registry=registry).set(1.5e-7)
    Histogram("seconds", "", registry=registry).observe(0.2)
    return generate_latest(registry).decode()


def test_every_sample_is_read_as_the_library_reads_it() -> None:
    text = written()
    theirs = [(sample.name, sample.value) for each in text_string_to_metric_families(text) for sample in each.samples]
    ours = Metrics.of(text).samples
    assert [(name, value) for name, _, value in ours] == theirs and len(theirs) > 5
    assert ("blocks", 'state="held"', math.inf) in ours


def test_sums_are_over_all_labels_or_by_one() -> None:
    snapshot = Metrics.of('a{x="1",y="2"} 3\na{x="1",y="3"} 4 1700000000000\na{x="2"} 5\n\n# a comment\nb 7\n')
    assert (snapshot.total("a"), snapshot.total("b"), snapshot.total("c")) == (12, 7, None)
    assert [snapshot.total("a", label) for label in ('x="1"', 'x="2"', 'y="4"')] == [7, 5, None]


def test_lines_in_another_format_are_skipped() -> None:
    assert Metrics.of("<html>\na{\na b\na\na 1.2.3\n").samples == []
