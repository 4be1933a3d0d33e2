"""Every sampling parameter and every field of a request is used, or documented as accepted without effect."""

import ast
import re
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.engine.front.submit import begin_answer
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.server import requests as schema
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.text.prompt import RENDERING
from penstock.executor.protocol import ModelInfo
from tests.support.fork_server import ROOT

PARAMS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 5,
    "max_tokens": 5,
    "min_tokens": 2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {7: 1.0},
    "stop_token_ids": [7],
    "ignore_eos": True,
    "allowed_token_ids": [7],
    "banned_token_ids": [7],
    "logprobs": 1,
    "prompt_logprobs": 1,
}
# Needed by the text alone, or by the grammar, which is compiled before.
TEXT_PARAMS = {"stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "structured_outputs"}
# Read in a loop over their names.
LOOPS = {*schema.SAMPLING_FIELDS, *RENDERING, *StructuredOutputs.__struct_fields__, "logprobs", "tools"}


def attributes(folder: str) -> set[str]:
    """Return every name that is read as an attribute in the code of a folder."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_sampling_parameter_reaches_the_core_or_the_text() -> None:
    info = msgspec.convert(
        {"architecture": "", "dtype": "", "device": "", "vocab_size": 50, "hidden_size": 8, "max_model_len": 64}
        | {"block_size": 4, "num_blocks": 9, "block_bytes": 8, "fingerprint": b"", "max_in_flight": 1},
        ModelInfo,
        strict=False,
    )

    def sent(**values: Any) -> Any:
        params = SamplingParams(**{"seed": 1, **values})
        answer = begin_answer("r", b"\1\0\0\0", params, info, None, Mock(), sampling=params.sampling([3]))
        return msgspec.to_builtins(answer.messages)

    assert [name for name, value in PARAMS.items() if sent(**{name: value}) == sent()] == []
    assert {*PARAMS} | TEXT_PARAMS == {*SamplingParams.__struct_fields__}
    assert attributes("engine") >= TEXT_PARAMS - {"stop"} | {"stop_strings"}


@pytest.mark.parametrize("name", ["Completion", "Chat", "Embedding", "Tokenize", "Detokenize"])
def test_every_field_of_a_request_is_read(name: str) -> None:
    assert {*getattr(schema, f"{name}Request").__struct_fields__} <= attributes("engine/server") | LOOPS


def test_fields_that_are_accepted_without_effect_are_documented() -> None:
    text = (ROOT / "docs/api.md").read_text()
    (section,) = re.findall(r"\*\*Accepted without effect\*\*(.*?)\*\*Refused by name\*\*", text, re.S)
    documented = set(re.findall(r"`([\w.]+)`", section))
    assert OTHER_FIELDS.harmless - {"parallel_tool_calls"} <= documented
    parts = {"reasoning_content", "tool_calls", "tool_call_id", "arguments", "include_stop_str_in_output"}
    parts |= {"description", "function_call", "audio"}  # written into the prompt or refused, in a loop over names
    read = attributes("engine/server") | {*schema.SAMPLING_FIELDS, *RENDERING} | parts
    for kind in vars(schema).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == schema.__name__:
            assert {*kind.__struct_fields__} - read <= {name.rpartition(".")[2] for name in documented}, kind.__name__
