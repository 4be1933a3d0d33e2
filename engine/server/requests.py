"""The request schemas: one struct per endpoint, and the known but unsupported fields of OpenAI's and vLLM's APIs.

An unsupported field (other_fields.json) is refused by name if it would change the answer. A field that is in none of
these lists is ignored at the top level and inside messages and tools, so that a new field of a client library causes no
outage: its name is collected for the log and for the response header (app.py). The structs only define types;
SamplingParams and the engine validate the values.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Raw

from penstock.engine.front.submit import KvTransfer, Pooling
from penstock.engine.http.body import decode, decode_fields, decoded, split_object
from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import refused_part
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.server.custom_tools import Function, Grammar, TextInput, as_function
from penstock.engine.server.other_fields import OTHER_FIELDS, UnsupportedField, check_neutral, declared
from penstock.engine.text.chat_messages import CalledFunction, Message, PastCall, TextPart

MAX_FIELD_BYTES = 256 * 1024  # JSON size of a single field, except fields that carry the text
TEXT_FIELDS = frozenset({"prompt", "messages", "input", "tokens"})
OPEN_FIELDS = ("tools", "system")  # unknown fields inside them are ignored, as in messages (other_fields.py)
# Fields of SamplingParams that requests have under the same name and with the same meaning.
SAMPLING_FIELDS = [name for name in SamplingParams.__struct_fields__ if name not in ("logprobs", "detokenize")]

Request = TypeVar("Request", bound=msgspec.Struct)
Converted = TypeVar("Converted")

FilePath = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\A[^\0]*\Z")]  # of the server's own files
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False  # accepted, but no padding is ever added; it would not change the answer


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response_format.json_schema`. The answer always keeps to the schema, whatever `strict` says."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None  # with json_object, as in llama.cpp


class ModelRequest(msgspec.Struct, kw_only=True):
    """The field of every endpoint that names a model. An absent field and null mean the default."""

    UNSERVED: ClassVar = OTHER_FIELDS.unserved  # the known fields that are refused unless their value is neutral

    model: str | None = None


class PromptRequest(ModelRequest, kw_only=True):
    """The fields of every endpoint that runs the model."""

    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None  # which end of the prompt is cut off
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class GenerateRequest(PromptRequest, kw_only=True):
    """The fields of both completion endpoints, beside those that `with_sampling` adds."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    explain_cache: bool | None = None  # in the usage: which tokens were cached, and why no more
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    kv_transfer_params: KvTransfer | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def with_sampling(kind: type[Request], without: Collection[str] = ()) -> type[Request]:
    """Return `kind` with a field for each of SAMPLING_FIELDS that it does not declare, except those in `without`."""
    declared = get_type_hints(SamplingParams)  # without limits: SamplingParams names the value that exceeds one
    missing = [name for name in SAMPLING_FIELDS if name not in (*kind.__struct_fields__, *without)]
    added = [(name, declared[name] | None, None) for name in missing]
    namespace = {"__doc__": kind.__doc__}
    whole = msgspec.defstruct(
        kind.__name__, added, bases=(kind,), module=kind.__module__, namespace=namespace, kw_only=True
    )
    return cast(type[Request], whole)


@with_sampling
class CompletionRequest(GenerateRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: Raw  # decoded by prompts.py after it has checked the size, as `input`
    echo: bool | None = None
    logprobs: int | None = None


def check_type(kind: str, **has: bool) -> None:
    """Raise ValueError unless, of the fields that belong to one type each, only that of `kind` is there."""
    if any(there != (name == kind) for name, there in has.items()):
        raise ValueError(f"the type {kind!r} needs the field {kind!r}, and no field of another type")


class PastFunction(CalledFunction, frozen=True, forbid_unknown_fields=True):
    """The function of a call."""


class PastInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A custom tool's call."""

    name: str
    input: str


_NO_CALL = PastFunction("", "")
_NO_FUNCTION = Function("")


class ChatCall(PastCall, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier answer. That of a custom tool becomes a call of its function."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    function: PastFunction = _NO_CALL
    custom: PastInput | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None  # sent back by clients that assemble a call from a stream

    def __post_init__(self) -> None:
        check_type(self.type, function=self.function is not _NO_CALL, custom=self.custom is not None)
        if (custom := self.custom) is not None:
            self.function = PastFunction(custom.name, {"input": custom.input})


class ContentPart(TextPart, frozen=True, forbid_unknown_fields=True):
    """A part of a message. Rendering the message checks that it is a text."""


class ChatMessage(Message, kw_only=True, forbid_unknown_fields=True):
    """A message of a chat request."""

    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[ChatCall] | None = None
    # Further fields of our own answers, which clients send back as history.
    refusal: str | None = None
    annotations: Raw = Raw()  # not part of the prompt, so it is never decoded
    audio: Any = None
    function_call: Any = None


class ChatGrammarFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    grammar: Grammar


class ChatCustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A custom tool, in the chat API's form."""

    name: str
    description: str | None = None
    format: TextInput | ChatGrammarFormat | None = None

    @property
    def grammar(self) -> Grammar | None:
        return self.format.grammar if isinstance(self.format, ChatGrammarFormat) else None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function, or a custom tool, whose `function` is the one that the model is shown."""

    function: Function = _NO_FUNCTION
    custom: ChatCustomTool | None = None
    type: Literal["function", "custom"] = "function"

    def __post_init__(self) -> None:
        check_type(self.type, function=self.function is not _NO_FUNCTION, custom=self.custom is not None)
        if (custom := self.custom) is not None:
            shown = as_function(custom.name, custom.description, custom.grammar)
            msgspec.structs.force_setattr(self, "function", shown)


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionName | None = None
    custom: FunctionName | None = None
    type: Literal["function", "custom"] = "function"

    def __post_init__(self) -> None:
        check_type(self.type, function=self.function is not None, custom=self.custom is not None)


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice.allowed_tools`: calls of only these tools. The prompt shows all tools, so that its prefix stays cached."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice`: exactly this tool, or calls of some of the tools."""

    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    type: Literal["function", "custom", "allowed_tools"] = "function"

    def __post_init__(self) -> None:
        has = {name: getattr(self, name) is not None for name in ("function", "custom", "allowed_tools")}
        check_type(self.type, **has)


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@with_sampling
class ChatRequest(GenerateRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Raw  # decoded by conversation.py after it has checked the size
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # handed to the template, like chat_template_kwargs
    verbosity: str | None = None  # handed to a template that has such a variable; else ignored
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# Fields that the agents' APIs, if they have them, share under the same name and with the same meaning.
CHAT_FIELDS = frozenset(ChatRequest.__struct_fields__) - {"messages", "tools", "tool_choice"}


class EmbeddingRequest(PromptRequest, kw_only=True):
    """POST /v1/embeddings"""

    input: Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None


class TokenizeRequest(ModelRequest, kw_only=True):
    """POST /tokenize: of `prompt` or of `messages`"""

    prompt: str | None = None
    messages: Raw = msgspec.field(default_factory=Raw)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # handed to the template, like chat_template_kwargs
    verbosity: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """POST /detokenize"""

    tokens: Raw
    skip_special_tokens: bool | None = None


class NoFields(msgspec.Struct, kw_only=True):
    """POST /reset_prefix_cache, /resume"""


_ELSEWHERE = UnsupportedField("this endpoint has no such field")


# Fields of our own endpoints. An endpoint that lacks one of them refuses it instead of ignoring it.
OWN_FIELDS = frozenset(
    name
    for kind in (CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
    for name in kind.__struct_fields__
)


ModelRequestT = TypeVar("ModelRequestT", bound=ModelRequest)


def parse(body: bytes, kind: type[ModelRequestT], ignored: list[str]) -> ModelRequestT:
    """Decode the request in `body`; append the names of unknown fields, also of those in OPEN_FIELDS, to `ignored`.

    Raise HttpError or InvalidRequest, naming the field, if a field is invalid or its value is not supported.
    """
    known = kind.__struct_fields__
    fields = split_object(body)
    for name, raw in fields.items():
        if name in known:
            if name not in TEXT_FIELDS and len(bytes(raw)) > MAX_FIELD_BYTES:
                raise InvalidRequest(name, f"{len(bytes(raw))} bytes of JSON; at most {MAX_FIELD_BYTES} are allowed")
        elif name in kind.UNSERVED:
            check_neutral(name, _small(name, raw), kind.UNSERVED[name])
        elif name in OTHER_FIELDS.harmless:
            continue
        elif name in OWN_FIELDS:
            check_neutral(name, _small(name, raw), _ELSEWHERE)
        else:
            ignored.append(name)
    try:
        return decoded(kind, body)
    except msgspec.ValidationError:
        types = {field.name: field.type for field in msgspec.structs.fields(kind) if field.name in OPEN_FIELDS}
        lenient = {name: Raw(declared(types[name], fields[name], name, ignored)) for name in types if name in fields}
        return decode_fields(kind, fields | lenient)
    except (msgspec.DecodeError, RecursionError):
        return decode(kind, body)  # explains the error


def parse_control(kind: type[Request], query: Mapping[str, list[str]], body: bytes) -> Request:
    """Decode the request of a control route, whose fields may be in the URL's `query`, in the JSON body, or in both.

    Raise HttpError or InvalidRequest for an unknown name, and for a field that has two different values."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    fields = split_object(body) if body else {}
    for name in (*query, *fields):
        if name not in types:
            raise InvalidRequest(clip(name), "there is no such field here")
    values = {name: decode(types[name], raw, name) for name, raw in fields.items()}
    for name, texts in query.items():
        is_list = get_origin(types[name]) is tuple
        for text in (texts,) if is_list else texts:
            value = _converted(text, types[name], name)
            if values.setdefault(name, value) != value:
                raise InvalidRequest(name, f"{text!r} in the URL contradicts another value of the field")
    return _converted(values, kind)


def _converted(value: object, kind: type[Converted], name: str = "") -> Converted:
    """Convert the text of a field in the URL, or all values."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        within, _, reason = refused_part(value, kind, error, strict=False)
        raise InvalidRequest((name + within).lstrip("."), reason) from None


def _small(name: str, raw: Raw) -> Any:
    """Decode a value that may be neutral; a long one is not."""
    return decode(object, raw, name) if len(bytes(raw)) <= 256 else raw
