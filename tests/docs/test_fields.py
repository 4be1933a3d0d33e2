"""docs/api.md has a row for every field of a request, with its limits, and names the fields without effect."""

import ast
import re
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server import requests as schema
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.server.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from penstock.engine.text.prompt import RENDERING
from tests.docs.test_pages import ROOT

TEXT = (ROOT / "docs/api.md").read_text()
COMMON = {*CompletionRequest.__struct_fields__} & {*ChatRequest.__struct_fields__} - {"logprobs"}


def rows(heading: str) -> dict[str, str]:
    """Return the second cell of each row of a table, by the field in its first one."""
    table = TEXT.split(f"| {heading} | value (default) |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("field", COMMON),
        ("completions", {*CompletionRequest.__struct_fields__} - COMMON),
        ("chats", {*ChatRequest.__struct_fields__} - COMMON),
        ("embeddings", {*EmbeddingRequest.__struct_fields__} - {*schema.PromptRequest.__struct_fields__}),
    ],
)
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
