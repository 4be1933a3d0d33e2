"""The pages and the dashboard name existing metrics, and the pages name all of them. docs/api.md has a row for every field of a
request, with its limits, and names the fields without effect."""

import ast
import json
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import Meta
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import Stats
from penstock.engine.page.document import document
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server import requests as schema
from penstock.engine.server.metrics import METRICS
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.server.requests import ChatRequest, CompletionRequest
from penstock.engine.text.prompt import RENDERING
from penstock.executor.protocol import ExpertUpdate
from tests.docs.test_pages import ROOT
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.refusals import cases
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


TEXT = (ROOT / "docs/api.md").read_text()
COMMON = {*CompletionRequest.__struct_fields__} & {*ChatRequest.__struct_fields__} - {"logprobs"}


def rows(heading: str) -> dict[str, str]:
    """Return the second cell of each row of a table, by the field in its first one."""
    table = TEXT.split(f"| {heading} | value (default) |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


@pytest.mark.parametrize(("heading", "fields"), cases(__file__, "fields of requests", COMMON=COMMON, **vars(schema)))
def test_every_field_has_a_row(heading: str, fields: set[str]) -> None:
    assert rows(heading).keys() == fields


def limits(kind: Any) -> list[Meta]:
    """Return the limits of numbers in a type."""
    found = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Meta) and each.le is not None]
    return found + [limit for part in get_args(kind) if not isinstance(part, Meta) for limit in limits(part)]


def test_the_rows_have_the_limits_of_their_fields() -> None:
    types = get_type_hints(SamplingParams, include_extras=True) | get_type_hints(
        schema.GenerateRequest, include_extras=True
    )
    documented, num_checked = rows("field"), 0
    for name in documented.keys() & types.keys():
        for limit in limits(types[name]):
            low = limit.ge if limit.ge is not None else f"above {limit.gt}"
            is_int32 = (limit.ge, limit.le) == (-(2**31), 2**31 - 1)
            assert documented[name].startswith("integer of 32 bits" if is_int32 else f"{low} to {limit.le}"), name
            num_checked += 1
    assert num_checked >= 11


def read_attributes(folder: str) -> set[str]:
    """Return every name that is read as an attribute in the code of a folder."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_fields_that_are_accepted_without_effect_are_documented() -> None:
    (section,) = re.findall(r"\*\*Accepted without effect\*\*(.*?)\*\*Refused by name\*\*", TEXT, re.S)
    documented = set(re.findall(r"`([\w.]+)`", section))
    assert OTHER_FIELDS.harmless - {"parallel_tool_calls"} <= documented
    parts = {"reasoning_content", "tool_calls", "tool_call_id", "arguments", "include_stop_str_in_output"}
    parts |= {"description", "function_call", "audio"}  # written into the prompt or refused, in a loop over names
    read = read_attributes("engine/server") | {*schema.SAMPLING_FIELDS, *RENDERING} | parts
    for kind in vars(schema).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == schema.__name__:
            assert {*kind.__struct_fields__} - read <= {name.rpartition(".")[2] for name in documented}, kind.__name__
