"""The page for operators and its dashboard name metrics that there are, and all that there are."""

import json
import re
from array import array
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import Stats
from penstock.executor.protocol import ExpertUpdate
from tests.support.running_server import running

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\b((?:vllm|penstock):[a-z0-9_]+)(…?)")
ENDINGS = ("_total", "_bucket", "_sum", "_count", "_created")


def exported() -> set[str]:
    """Every sample that a server with tiers and experts exports."""
    shares = array("f", [0.5, 0.5]).tobytes()
    tiers: dict[str, dict[str, float]] = {
        tier: {"hit_tokens": 1, "used_blocks": 2, "corrupt_reads": 0} for tier in ("host", "disk")
    }
    with running() as server:
        server.engine.stats = Stats(
            num_blocks=4, tiers=tiers, experts=ExpertUpdate(balance=1.0, rank_load=shares, expert_load=shares)
        )
        server.http.get("/health")
        families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    return {family.name for family in families} | {sample.name for family in families for sample in family.samples}


def plain(name: str) -> str:
    return next((name.removesuffix(end) for end in ENDINGS if name.endswith(end)), name)


def test_the_page_names_every_metric_of_a_server_and_no_other() -> None:
    names = {plain(name) for name in exported() if name.startswith(("vllm:", "penstock:"))}
    found = NAME.findall((DOCS / "operations.md").read_text())
    groups = tuple(name for name, is_group in found if is_group)
    alone = {text for name, is_group in found if not is_group for text in (name, plain(name))}
    assert {name for name in names if not name.startswith(groups)} - alone == set()
    whole = {name for name, is_group in found if not is_group and not name.startswith(groups)}
    assert {name for name in whole if not {name, plain(name)} & names} == set()


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name, _ in NAME.findall(target["expr"])
    }
    assert len(asked) > 20
    server = {name for name in asked if not name.startswith("penstock:router_")}
    assert server - exported() == set()
    sources = (DOCS.parent / "router" / "metrics.py").read_text()
    for name in asked - server:
        assert plain(name).removeprefix("penstock:router_") in sources, f"{name} is nowhere counted"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
