"""The request schemas of Anthropic's Messages API: one struct per request, block and tool, and unsupported fields."""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, field

from penstock.engine.server.agents.items_schema import Id, Strict
from penstock.engine.server.custom_tools import Function
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.server.requests import PromptRequest


class ContentBlock(Strict, frozen=True, tag_field="type", kw_only=True):
    cache_control: Any = None  # without effect: all KV blocks are cached as long as they fit


class TextBlock(ContentBlock, frozen=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(ContentBlock, frozen=True, tag="thinking"):
    thinking: str
    signature: str | None = None  # ignored


class ToolUseBlock(ContentBlock, frozen=True, tag="tool_use"):
    id: Id
    name: str
    input: dict[str, Any]


class ToolResultBlock(ContentBlock, frozen=True, tag="tool_result"):
    tool_use_id: Id
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


class BlockMessage(Strict, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class ThinkingConfig(Strict, frozen=True):
    """Without it the model thinks as its template says. A budget holds no model to it; max_tokens does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


# Types of tools that run in Anthropic's cloud; items.own_tools skips them.
VENDOR_TOOLS = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))(_\d{8})?|mcp_toolset")


class BlockTool(Function, frozen=True, kw_only=True):
    """A function, which the client runs."""

    parameters: dict[str, Any] = field(name="input_schema")
    type: Literal["custom"] | None = None
    input_examples: list[dict[str, Any]] | None = None  # not shown to the model
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # without effect: input is always streamed eagerly


class BlockChoice(Strict, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(PromptRequest, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of"""

    UNSERVED = OTHER_FIELDS.unserved | OTHER_FIELDS.messages

    messages: Raw
    system: str | list[TextBlock] | None = None
    tools: list[Raw] | None = None
    tool_choice: BlockChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
