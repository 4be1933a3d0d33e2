"""The pages and the dashboard name existing metrics, and the pages name all of them."""

import json
import re
from array import array
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import Stats
from penstock.engine.page.document import document
from penstock.engine.server.metrics import METRICS
from penstock.executor.protocol import ExpertUpdate
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.router_fleet import running_router
from tests.support.running_server import running

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\b((?:vllm|penstock):\w*_\w*)(…?)")


@pytest.fixture(scope="module")
def programs() -> list[list[Metric]]:
    """Return the metrics of a server with tiers and experts, and of a router."""
    shares = array("f", [0.5, 0.5]).tobytes()
    tier = {name + "late" * name.endswith("_"): 1.0 for name in METRICS.tiers}
    engine = FakeEngine(info=msgspec.structs.replace(INFO, max_loras=1))
    with running(engine) as server, running_router(server.url) as router:
        experts = ExpertUpdate(balance=1.0, rank_load=shares, expert_load=shares)
        server.engine.stats = Stats(num_blocks=4, tiers={"host": tier, "disk": tier}, experts=experts)
        server.http.get("/health")
        texts = [each.http.get("/metrics").text for each in (server, router)]
    return [list(text_string_to_metric_families(text)) for text in texts]


@pytest.fixture(scope="module")
def exported(programs: list[list[Metric]]) -> tuple[set[str], set[str]]:
    """Return the metrics by the names that a query has; and all samples."""
    families = [family for metrics in programs for family in metrics]
    names = {family.name + "_total" * (family.type == "counter") for family in families}
    return names, names | {sample.name for family in families for sample in family.samples}


def test_every_metric_has_a_help_text_of_its_own(programs: list[list[Metric]]) -> None:
    for metrics in programs:
        counts = Counter(metric.documentation for metric in metrics)
        assert [metric.name for metric in metrics if counts[metric.documentation] > 1] == []
        assert all(metric.documentation and "docs/" not in metric.documentation for metric in metrics)


def test_the_pages_name_every_metric_and_no_other(exported: tuple[set[str], set[str]]) -> None:
    metrics = {name for name in exported[0] if name.startswith(("vllm:", "penstock:"))}
    for path in DOCS.rglob("*.md"):
        named = NAME.findall(path.read_text())
        groups = {name for name, is_group in named if is_group or name.endswith("_")}
        assert {name for name, _ in named} - groups - exported[1] == set(), path.name
        metrics -= {name for name, _ in named}
    assert {name for name in metrics if not name.startswith("penstock:kv_tier_")} == set(), "tiers.md has a table"


def test_the_dashboard_and_the_live_page_use_existing_metrics(exported: tuple[set[str], set[str]]) -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    on_the_board = {name for name, _ in NAME.findall(json.dumps(board["panels"]))}
    on_the_page = {name for name, _ in NAME.findall(bytes(document().body).decode())}
    assert len(on_the_board) > 20 and len(on_the_page) > 8
    assert (on_the_board | on_the_page) - exported[0] - exported[1] == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
