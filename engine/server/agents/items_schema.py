"""The request schemas of the Responses API: one struct per request, item and tool, and the unsupported fields."""

import re
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from penstock.engine.server.custom_tools import CustomTool, Function
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.server.requests import JsonSchema, PromptRequest, with_sampling

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
LOGPROBS = "message.output_text.logprobs"
# Many clients send the first. It has no effect: reasoning is plain text in its item's content, never encrypted.
Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
# Parts of the calls of tools that run in OpenAI's cloud. No answer has such calls, because these tools are skipped.
VendorPart = Literal[
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a request; a field that is not here is refused."""


class ItemText(Strict, frozen=True, omit_defaults=True):
    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""
    # These fields are not part of the prompt, so their values are dropped.
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None

    def __post_init__(self) -> None:
        for field in ("annotations", "logprobs", "prompt_cache_breakpoint"):
            msgspec.structs.force_setattr(self, field, None)


Text = str | list[ItemText]


class AnyItem(Strict, frozen=True, tag_field="type", kw_only=True):
    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(AnyItem, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    phase: str | None = None


class CallItem(AnyItem, frozen=True, tag="function_call"):
    call_id: Id
    name: str
    arguments: str


class ResultItem(AnyItem, frozen=True, tag="function_call_output"):
    call_id: Id
    output: Text
    name: str | None = None


class CustomCallItem(AnyItem, frozen=True, tag="custom_tool_call"):
    call_id: Id
    name: str
    input: str


class CustomResultItem(ResultItem, frozen=True, tag="custom_tool_call_output"):
    """The result of a custom tool's call."""


class ReasoningItem(AnyItem, frozen=True, tag="reasoning"):
    summary: list[ItemText] = []
    content: list[ItemText] | None = None
    encrypted_content: Literal[""] | None = None  # content encrypted by another server cannot be decrypted


ITEM = MessageItem | CallItem | ResultItem | CustomCallItem | CustomResultItem | ReasoningItem


class TextFormat(JsonSchema, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Strict, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the model has no such setting


class Effort(Strict, frozen=True):
    """`reasoning`. There are no summaries, for the reasoning itself is shown."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


# Types of tools that run in OpenAI's cloud or only work with its models; items.own_tools skips them.
VENDOR_TOOLS = re.compile(
    r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|file_search|code_interpreter|image_generation|mcp|namespace|tool_search"
    r"|programmatic_tool_calling"
)


class FlatTool(Function, frozen=True, kw_only=True, tag_field="type", tag="function"):
    output_schema: dict[str, Any] | None = None  # ignored, since it does not affect calls


AnyTool = FlatTool | CustomTool


class ChosenTool(Strict, frozen=True):
    type: Literal["function", "custom"]
    name: str


class CountItemsRequest(PromptRequest, kw_only=True):
    """POST /v1/responses/input_tokens: what a prompt is made of"""

    UNSERVED = OTHER_FIELDS.unserved | OTHER_FIELDS.responses

    input: Raw = msgspec.field(default_factory=Raw)
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: list[Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@partial(with_sampling, without=("n", "max_tokens", "prompt_logprobs"))
class ResponsesRequest(CountItemsRequest, kw_only=True):
    """POST /v1/responses"""

    stream: bool | None = None
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None  # without effect: no obfuscation is added
    max_output_tokens: int | None = None
    include: list[Literal[Included, VendorPart]] | None = None
    top_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # without effect: it limits tools that OpenAI runs
    prompt_cache_options: dict[str, Any] | None = None  # all KV blocks are cached as long as they fit
