"""The responses of completions and chats: the objects of the OpenAI API, with vLLM's additions that clients use.

An UNSET field is omitted from the JSON; None is sent as null.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.engine.front.results import Candidates
from penstock.engine.messages import FinishReason, Reuse

ChatFinish = FinishReason | Literal["tool_calls"]
PromptLogprobs = list[Candidates | None]  # vLLM's format; the entry of the first position is None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int
    penstock: list[Reuse] | UnsetType = UNSET  # of each prompt


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET
    prompt_tokens_details: CachedTokens | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weights_versions: list[int] | UnsetType = UNSET  # of each of these, when the weights have been updated
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class NamedAnswer(msgspec.Struct):
    """The fields that every answer begins with."""

    id: str
    created: int
    model: str


class Completion(NamedAnswer):
    """A whole answer, or one event of a stream."""

    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""  # JSON text as written by the model


class ToolCall(msgspec.Struct):
    """A call, or a part of one in a stream: the first part has its id, type and name, the others go on with its arguments."""

    function: CalledFunction
    index: int | UnsetType = UNSET  # in a stream
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """An answer, or a part of one in a stream."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weights_versions: list[int] | UnsetType = UNSET  # of each of these, when the weights have been updated


class Chat(NamedAnswer):
    choices: list[ChatChoice]
    usage: Usage | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weights_versions: list[int] | UnsetType = UNSET  # of each of these, when the weights have been updated


class ChatChunk(NamedAnswer):
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
