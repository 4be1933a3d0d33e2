"""docs/api.md has a row for every field of a request, with its limits."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Meta

from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    PromptRequest,
)

TEXT = (Path(__file__).parents[2] / "docs/api.md").read_text()
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
        ("embeddings", {*EmbeddingRequest.__struct_fields__} - {*PromptRequest.__struct_fields__}),
    ],
)
def test_every_field_has_a_row(heading: str, fields: set[str]) -> None:
    assert rows(heading).keys() == fields


def limits(kind: Any) -> list[Meta]:
    """Return the limits of numbers in a type."""
    found = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Meta) and each.le is not None]
    return found + [limit for part in get_args(kind) if not isinstance(part, Meta) for limit in limits(part)]


def test_the_rows_have_the_limits_of_their_fields() -> None:
    types = get_type_hints(SamplingParams, include_extras=True) | get_type_hints(GenerateRequest, include_extras=True)
    documented, num_checked = rows("field"), 0
    for name in documented.keys() & types.keys():
        for limit in limits(types[name]):
            low = limit.ge if limit.ge is not None else f"above {limit.gt}"
            is_int32 = (limit.ge, limit.le) == (-(2**31), 2**31 - 1)
            assert documented[name].startswith("integer of 32 bits" if is_int32 else f"{low} to {limit.le}"), name
            num_checked += 1
    assert num_checked >= 11
