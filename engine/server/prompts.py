"""Converts the input of a request (text, ids, messages) to token ids. Sizes are checked before they cause work.

Tokenizing half a megabyte takes tens of milliseconds, so long inputs are tokenized in a thread: the tokenizer releases
the GIL, so other requests' streams continue.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Raw
from msgspec.structs import asdict

from penstock.engine.front.submit import check_length, token_bytes
from penstock.engine.http.body import decode
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.call import Call
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.requests import ChatRequest, PromptRequest, TokenizeRequest
from penstock.engine.server.service import Service
from penstock.engine.text.prompt import INLINE_CHARS, MAX_CHARS_PER_TOKEN, chat_prompt, rendering, show_tools
from penstock.engine.text.render_time import TRIAL_S, RenderTimeout, limited
from penstock.executor.protocol import ModelInfo

T = TypeVar("T")

MAX_PROMPT_LOGPROBS = 4_000_000  # in one answer; each takes a few hundred bytes of memory


def decode_inputs(
    field: str, raw: Raw, max_inputs: int, info: ModelInfo, num_answered: int = 1
) -> list[str] | list[list[int]]:
    """Decode a field like `prompt` or `input`: one or many texts or lists of token ids.

    Brackets and commas are counted in the raw JSON first, so that three million ids are refused in 10 ms.
    """
    value = bytes(raw)
    inside = value[1:].lstrip(b" \t\r\n")[:1] if value[:1] == b"[" else b""
    if value[:1] == b'"':
        return [decode(str, raw, field)]
    if inside == b'"':
        # Only the quotes around a text can have no backslash before them, so each text counts for at most two.
        if value.count(b'"') - value.count(b'\\"') > 2 * max_inputs:
            raise InvalidRequest(field, f"more than {max_inputs} inputs; 1 to {max_inputs} are allowed")
        texts = decode(list[str], raw, field)
        _check_count(field, len(texts), max_inputs)
        return texts
    if inside == b"[":
        num_lists, num_ids = value.count(b"[") - 1, value.count(b",") + 1
        _check_count(field, num_lists, max_inputs)
        if num_ids > num_lists * info.max_model_len:
            check_length(-(-num_ids // num_lists), info, field, num_answered)  # the longest list has at least this many
        return decode(list[list[int]], raw, field)
    if inside and inside in b"-0123456789":
        return [decode_ids(field, raw, info, num_answered)]
    raise InvalidRequest(field, "a string, a list of strings, or one or more lists of token ids is expected")


def decode_ids(field: str, raw: Raw, info: ModelInfo, num_answered: int = 0) -> list[int]:
    """Decode a list of token ids; raise InvalidRequest if it is too long for a prompt."""
    num_ids = bytes(raw).count(b",") + 1
    if num_ids > info.max_model_len:  # the full length is allowed if nothing is generated
        check_length(num_ids, info, field, num_answered)
    return decode(list[int], raw, field)


async def to_ids(
    field: str,
    inputs: Sequence[str | list[int]],
    service: Service,
    request: PromptRequest | TokenizeRequest,
    num_answered: int = 1,
) -> list[bytes]:
    """Return the token ids of every input as the engine takes them; check that they fit the context together with
    `num_answered` tokens."""
    info, tokenizer = service.info, service.tokenizer
    texts = [text for text in inputs if isinstance(text, str)]
    limit = MAX_CHARS_PER_TOKEN * info.max_model_len
    if (longest := max(map(len, texts), default=0)) > limit:  # cannot fit with any tokenization
        what = f"{longest} characters; a context of {info.max_model_len} tokens takes at most {limit}"
        raise InvalidRequest(field, what)
    truncate_to = request.truncate_prompt_tokens if isinstance(request, PromptRequest) else None
    keep = _kept_tokens(truncate_to, info, num_answered)
    prompts = [ids for ids in inputs if isinstance(ids, list)]
    if texts:
        # For messages, the chat template has already added the special tokens.
        adds = bool(request.add_special_tokens) if field == "messages" else request.add_special_tokens is not False
        prompts = await in_thread_if(sum(map(len, texts)) > INLINE_CHARS, lambda: tokenizer.encode_batch(texts, adds))
    if keep:
        is_right = isinstance(request, PromptRequest) and request.truncation_side == "right"
        prompts = [ids[:keep] if is_right else ids[-keep:] for ids in prompts]
    for ids in prompts:
        check_length(len(ids), info, field, num_answered)
    return [token_bytes(ids, info.vocab_size, field) for ids in prompts]


def given_ids(call: Call, field: str, raw: Raw) -> list[int] | None:
    """Return the token ids that a router sent after the body instead of `field`, or None."""
    if call.prompt_ids is not None and bytes(raw) != b"null":
        raise InvalidRequest(field, "token ids follow the body, so it has to be null")
    return call.prompt_ids


async def in_thread_if(is_long: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long else work()


def apply_verbosity(request: ChatRequest | TokenizeRequest, service: Service, ignored: list[str]) -> None:
    """Hand `verbosity` to a template that has such a variable; otherwise it is ignored, and named in `ignored`."""
    if request.verbosity is None:
        return
    if service.template is not None and re.search(r"\bverbosity\b", service.template.source):
        request.chat_template_kwargs = {"verbosity": request.verbosity, **(request.chat_template_kwargs or {})}
    else:
        ignored.append("verbosity")


async def render(request: ChatRequest | TokenizeRequest, conversation: Conversation, service: Service) -> str:
    """Render the conversation with the model's chat template and return the prompt. Only a short rendering runs on the
    event loop, which a thread would slow down; one that takes long is started again in a thread."""
    template = service.template
    if template is None:
        raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
    tools = show_tools([asdict(tool.function) for tool in request.tools or ()], request.tool_choice)

    def prompt() -> str:
        conversation.check()
        return chat_prompt(template, conversation.messages, tools=tools, **rendering(request))

    if conversation.size_bytes <= INLINE_CHARS and not template.is_slow:
        try:
            with limited(TRIAL_S):
                return prompt()
        except RenderTimeout:
            template.is_slow = True
    return await asyncio.get_running_loop().run_in_executor(service.renderers, prompt)


async def count_tokens(request: ChatRequest, conversation: Conversation, service: Service) -> int:
    """Return how many tokens the prompt of a conversation would have, without a limit on its length."""
    with service.admit(1):
        text, adds = await render(request, conversation, service), bool(request.add_special_tokens)
        ids = await in_thread_if(len(text) > INLINE_CHARS, lambda: service.tokenizer.encode(text, adds))
    return len(ids)


def _kept_tokens(truncate_to: int | None, info: ModelInfo, num_answered: int) -> int:
    """Return how many tokens of a prompt to keep, or 0 for all. A `truncate_to` of -1 keeps what fits."""
    field = "truncate_prompt_tokens"
    if truncate_to is None:
        return 0
    if truncate_to == -1:
        return info.max_model_len - num_answered
    if truncate_to == 0:
        raise InvalidRequest(field, "0 is out of range; it must be at least 1, or -1 for what fits")
    check_length(truncate_to, info, field, num_answered)
    return truncate_to


def _check_count(field: str, count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        raise InvalidRequest(field, f"{count} inputs; 1 to {limit} are allowed")


def check_prompt_logprobs(field: str, prompts: Sequence[bytes], num_each: int | None, num_copies: int) -> None:
    """Raise InvalidRequest if an answer would list too many log-probabilities of its prompts: `num_each` and that of the
    token itself at every position, `num_copies` times."""
    num_positions = sum(map(len, prompts)) // 4  # bytes of a token id
    if num_each is not None and num_positions * num_copies * (num_each + 1) > MAX_PROMPT_LOGPROBS:
        times = f"{num_positions} positions × {num_copies} × {num_each + 1}"
        raise InvalidRequest(field, f"{times} log-probabilities of prompts; at most {MAX_PROMPT_LOGPROBS} are allowed")
