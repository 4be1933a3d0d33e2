"""Validates the tools of a chat request, and plans how its answers are parsed and constrained by a grammar.

The model's tool call format and reasoning marks are detected once, from its chat template, unless the operator names
them.
"""

import hashlib
import logging
import re
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from penstock.cache.keys import RecentKeys
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.tool_calls import grammar, messages_grammar
from penstock.engine.grammar.validator import Validator
from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import FinishReason
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.server.requests import AllowedTool, ChatRequest, NamedTool, Tool
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.text.stop_strings import StopCondition
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.tools import formats, harmony, thinking
from penstock.engine.text.tools.answer_reader import AnswerReader
from penstock.engine.text.tools.call_kinds import Calls, ToolSpec, tokens_in
from penstock.engine.text.tools.reader import CallStart, Content, Piece, Reasoning
from penstock.engine.text.tools.thinking import Thinking

# Types that a tool's arguments must not have; an unknown type stands for an object.
NOT_OBJECTS = ("null", "boolean", "integer", "number", "string", "array")
log = logging.getLogger("penstock.engine")

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024  # JSON size of one function's parameters
SHORT_ID = 9  # an id of this length has no prefix: Mistral's templates only allow letters and digits
END_TOKENS = 16  # tokens at the end of a prompt: enough for a mark and whitespace after it

ChatFinish = FinishReason | Literal["tool_calls"]

_OFF = "the server was started without them (--tool-call-parser none)"
_UNKNOWN = "how this model's chat template writes calls is not known here; --tool-call-parser can name a format"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Reading:
    """Parses one choice into pieces (text, reasoning, calls) for all chat APIs. Without a reader, all of it is text."""

    def __init__(self, plan: "ReadingPlan", reader: AnswerReader | harmony.HarmonyReader | None) -> None:
        self._plan, self._reader = plan, reader
        self._num_chars = 0  # of the text so far

    def pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces that the next text of the answer completes, with an id for every call."""
        if self._reader is None:
            self._num_chars += len(text)
            return [Content(text, self._num_chars)] if text else []
        found = self._reader.feed(text)
        if is_last:
            found = found + self._reader.finish()
        return [
            piece._replace(id=self._new_id()) if isinstance(piece, CallStart) else piece
            for piece in found
            if self._plan.shows_reasoning or not isinstance(piece, Reasoning)
        ]

    def finish_reason(self, reason: FinishReason | None) -> ChatFinish | None:
        """Return the finish reason. Instead of "stop" it is "tool_calls" after calls, and "length" if a token that the client
        chose to stop at cuts off a call. Call it after the last piece."""
        if reason != "stop" or self._reader is None or not self._reader.num_calls:
            return reason
        return "tool_calls" if self._reader.has_called else "length"

    def _new_id(self) -> str:
        assert self._plan.calls is not None
        length = self._plan.calls.form.id_length
        return secrets.token_hex(length)[:length] if length == SHORT_ID else f"call_{secrets.token_hex(length // 2)}"


@dataclass(frozen=True)
class ReadingPlan:
    """How the answers of one request are parsed."""

    calls: Calls | None
    thinking: Thinking | None
    is_certain: bool
    shows_reasoning: bool
    special_ids: frozenset[int]  # the model's special tokens in calls and around reasoning

    @property
    def is_plain(self) -> bool:
        return self.calls is None and self.thinking is None

    @property
    def shown_ids(self) -> frozenset[int]:
        """The special tokens whose text the parsers need."""
        return frozenset() if self.is_plain else self.special_ids

    @property
    def has_headers(self) -> bool:
        """True if the answer has headers, which are not part of the text."""
        return is_harmony(self.calls, self.thinking)

    def begin(self) -> Reading:
        """Return a new parser for one choice."""
        return Reading(self, None if self.is_plain else self._reader())

    def stop_condition(self) -> StopCondition:
        """Return the condition under which stop strings end one choice: not in a header, nor within a call that a grammar
        enforces, which would be left incomplete. This is a parser of its own, since the parser of `begin` gets no text
        that may still become a stop string."""
        reader = self._reader()

        def may_stop(text: str) -> bool:
            reader.feed(text)
            return not reader.is_enforced

        return may_stop

    def _reader(self) -> AnswerReader | harmony.HarmonyReader:
        kind = harmony.HarmonyReader if self.has_headers else AnswerReader
        return kind(self.calls, self.thinking, is_certain=self.is_certain)


class Tools:
    """The served model's tool call format and reasoning marks."""

    def __init__(self, config: ServerConfig, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        source = template.source if template is not None else ""
        has_args = tokenizer.backend.token_to_id("[ARGS]") is not None
        self._tokenizer, self._config = tokenizer, config
        named = formats.ALIASES.get(config.tool_call_parser, config.tool_call_parser)
        if named == "auto":
            has_tools = template is not None and template.has_tools
            self.form = formats.detect(source, has_tools, has_args)
        else:
            self.form = None if named == "none" else formats.named(named, source, has_args)
        if template is not None and not template.has_tools and self.form not in (None, formats.HERMES, formats.CODER):
            log.warning("%s: the chat template does not support tools, so the prompt describes hermes's format", named)
        self._validator = Validator()
        # 256 KiB at most each, or None if refused; an agent sends the same tools with every request.
        self._grammars = RecentKeys(64)
        parser = config.reasoning_parser
        self.marks = thinking.detect(source) if parser == "auto" else thinking.NAMES.get(parser)
        texts = [*tokens_in(*(self.marks or ())[:2]), *(self.form.tokens if self.form else ())]
        texts += harmony.TOKENS if self.marks is thinking.HARMONY else ()
        ids = {text: tokenizer.backend.token_to_id(text) for text in texts}
        self._special_ids = {text: id_ for text, id_ in ids.items() if id_ in tokenizer.special_ids}

    def calls(self, request: ChatRequest) -> Calls | None:
        """Return the calls that the answer may have, or None; raise InvalidRequest for invalid tools."""
        tools, choice = request.tools or [], request.tool_choice or "auto"
        if not tools:
            if choice not in ("none", "auto"):
                raise InvalidRequest("tool_choice", "there are no tools to choose from")
            return None
        asked = request.structured_outputs
        functions = _functions(tools, self._config.coerce_one_of or (asked is not None and asked.coerce_one_of))
        is_named = isinstance(choice, NamedTool) and choice.allowed_tools is None
        if isinstance(choice, NamedTool):
            functions = _chosen(functions, choice, {tool.function.name: tool.type for tool in tools})
            choice = "required" if choice.allowed_tools is None else choice.allowed_tools.mode
        if choice == "none":
            return None
        if self.form is None:
            raise InvalidRequest("tools", _OFF if self._config.tool_call_parser == "none" else _UNKNOWN)
        must = choice != "auto"
        if must:
            functions = [function._replace(is_strict=True) for function in functions]
        many = request.parallel_tool_calls is not False and self.form.has_many and not is_named
        return Calls(self.form, functions, must, many)

    async def plan(
        self,
        request: ChatRequest,
        begun: str,
        calls: Calls | None,
        prompt: bytes,
        answer_format: StructuredOutputs | None,
    ) -> tuple[ReadingPlan, str | None]:
        """Return the parsing plan, and the text of the grammar for `answer_format`, the calls and the reasoning, if any.
        `begun`: the text that the answer continues. `prompt`: token ids, int32. Optional calls whose grammar is refused
        are only parsed."""
        thought = None if self.marks is None else self._thinking(self.marks, prompt, begun)
        is_held = calls is not None and (calls.must or self._config.constrain_auto_tools or answer_format is not None)
        text = await self._grammar(calls, answer_format, thought) if is_held else None
        if text is None:
            is_held = False
            text = await self._grammar(None, answer_format, thought)
        shows_reasoning = request.include_reasoning is not False
        return ReadingPlan(calls, thought, is_held, shows_reasoning, frozenset(self._special_ids.values())), text

    def _thinking(self, marks: thinking.Marks, prompt: bytes, begun: str) -> Thinking:
        num_tokens = END_TOKENS + len(begun.encode())
        end = self._tokenizer.decode(array("i", prompt[-4 * num_tokens :]), skip_special_tokens=False)
        if marks is thinking.HARMONY:
            return harmony.after_prompt(end)
        return thinking.thinking_after(marks, end, begun if end.endswith(begun) else begun.rstrip())

    async def _grammar(
        self, calls: Calls | None, answer_format: StructuredOutputs | None, thought: Thinking | None
    ) -> str | None:
        """Return the text of one grammar for reasoning followed by calls or the requested format. Return None without a
        constraint, or if the grammar of optional calls is refused."""
        if calls is not None and calls.must:
            answer_format = None  # a required call follows the tool's schema; the format only applies to text
        thought = None if thought is None or thought.is_over else thought
        if calls is None and (answer_format is None or thought is None):
            return None if answer_format is None else grammar_source(answer_format)
        content = msgspec.json.encode([calls and [calls.form.name, *calls[1:]], answer_format, thought])
        if (key := hashlib.sha256(content).digest()) not in self._grammars:
            self._grammars.add(key, await self._build(calls, answer_format, thought))
        text: str | None = self._grammars[key]
        return text

    async def _build(
        self, calls: Calls | None, answer_format: StructuredOutputs | None, thought: Thinking | None
    ) -> str | None:
        """Build the grammar. The client did not request one for optional calls, so they are not constrained by one that
        is refused: that is logged, and None is returned. Any other grammar is refused by the core."""
        build = partial(messages_grammar if is_harmony(calls, thought) else grammar, thinking=thought)
        if calls is not None and answer_format is not None:
            refusal = await self._validator.refusal(grammar_source(answer_format))
            if refusal is not None:
                raise InvalidRequest(answer_format.field, f"the grammar cannot be compiled: {refusal}")
        if calls is None or calls.must or any(function.is_strict for function in calls.functions):
            return build(self._special_ids, calls, answer_format)
        try:
            text = build(self._special_ids, calls, answer_format)
            refusal = await self._validator.refusal(text)
        except InvalidRequest as error:
            if error.field != "tools":
                raise
            refusal = error.message
        if refusal is None:
            return text
        names = clip(", ".join(function.name for function in calls.functions))
        log.warning("tools %s: optional calls are not constrained by a grammar: %s", names, refusal)
        return None


def is_harmony(calls: Calls | None, thought: Thinking | None) -> bool:
    return (thought is not None and thought.marks is thinking.HARMONY) or (
        calls is not None and calls.form is harmony.FORM
    )


def _chosen(functions: list[ToolSpec], choice: NamedTool, types: Mapping[str, str]) -> list[ToolSpec]:
    """Return the functions that `choice` names. `types`: the types of the tools, by name."""
    tools: dict[str, NamedTool | AllowedTool] = {"tool_choice": choice}
    if choice.allowed_tools is not None:
        tools = {f"tool_choice.allowed_tools.tools[{i}]": tool for i, tool in enumerate(choice.allowed_tools.tools)}
    names: set[str] = set()
    for field, tool in tools.items():
        chosen = tool.function or tool.custom
        assert chosen is not None, "the type of a tool has its field"
        if chosen.name not in types:
            raise InvalidRequest(f"{field}.{tool.type}.name", f"{clip(chosen.name)!r} is not among the tools")
        if types[chosen.name] != tool.type:
            raise InvalidRequest(f"{field}.type", f"the tool {clip(chosen.name)!r} has another type")
        names.add(chosen.name)
    return [function for function in functions if function.name in names]


def _functions(tools: list[Tool], coerce_one_of: bool) -> list[ToolSpec]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(tools)} given; at most {MAX_TOOLS} are allowed")
    functions: dict[str, ToolSpec] = {}
    for index, tool in enumerate(tools):
        field, function = f"tools[{index}].function", tool.function
        if _NAME.fullmatch(function.name) is None:
            raise InvalidRequest(
                f"{field}.name", f"{clip(function.name)!r}; 1 to 64 letters, digits, underscores and dashes are allowed"
            )
        if function.name in functions:
            raise InvalidRequest(f"{field}.name", f"{function.name!r} is given twice")
        functions[function.name] = ToolSpec(
            function.name, _schema(f"{field}.parameters", function.parameters), bool(function.strict), coerce_one_of
        )
    return list(functions.values())


def _schema(field: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    size_bytes = len(msgspec.json.encode(schema))
    if size_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(field, f"{size_bytes} bytes of JSON; at most {MAX_SCHEMA_BYTES} are allowed")
    types = schema.get("type", "object")
    if all(each in NOT_OBJECTS for each in (types if isinstance(types, list) else [types])):
        raise InvalidRequest(f"{field}.type", f"{clip(str(types))!r}; arguments are an object")
    return schema
