"""Turns the body of a request into what the placement needs (token ids, salt, length), and into a body with the ids. The
application prepares a request once, and the exchange sends it, perhaps to one replica after the other.

Prompts are tokenized once, here, and the engine is sent the ids. The ids are sent only if the engine would make the same
ones: all fields of the body are known not to change the prompt, and the replica has the same tokenizer and template.
Otherwise the ids only serve to find cached blocks, and the replica gets the client's own body. Without a tokenizer, four
bytes of JSON stand for a token: no engine has such keys, but requests with a common beginning go to the same replica.
"""

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.engine.text.chat_messages import Message
from penstock.engine.text.prompt import INLINE_CHARS, MAX_CHARS_PER_TOKEN, RENDERING, chat_prompt, rendering, show_tools
from penstock.engine.text.render_time import RENDER_S, TRIAL_S, RenderTimeout, limited
from penstock.engine.text.template import ChatTemplate, text_digest
from penstock.engine.text.tokenizer import Tokenizer
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.placement import Placement, Prompt
from penstock.router.placement.segments import SegmentCache

THREADS = 2
NOTHING = Raw()
BYTES_PER_TOKEN = 4

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# The fields of a body that make the prompt, in order. No ids are made for /v1/responses and /v1/messages: their bytes are
# used, as without a tokenizer.
PROMPTS = {
    CHAT: ("messages",),
    COMPLETIONS: ("prompt",),
    "/v1/responses": ("instructions", "input"),
    "/v1/messages": ("system", "messages"),
}
# Its texts are computed too, and it is placed by load alone. Other routes without a prompt cost no prefill.
EMBEDDINGS = "/v1/embeddings"

# Fields that do not change the prompt. With a field that is not listed, the replica is not sent ids.
NOT_IN_PROMPT = msgspec.json.decode(Path(__file__).with_name("not_in_prompt.json").read_bytes(), type=frozenset[str])
RENDERED = frozenset({"messages", "add_special_tokens", *RENDERING})
PLAIN_ROLES = frozenset({"system", "developer", "user", "assistant"})

_JSON = token_form.REPORT_HEADER + b": cached-tokens\r\ncontent-type: application/json\r\n"
_WITH_IDS = token_form.REPORT_HEADER + b": cached-tokens\r\ncontent-type: %b\r\n" % token_form.CONTENT_TYPE
_TEXT = msgspec.json.Decoder(str)
_FLAG = msgspec.json.Decoder(bool | None)
_IDS = msgspec.json.Decoder(list[int])


class RequestFields(msgspec.Struct):
    """The fields of a request that the router reads."""

    model: str | None = None
    prompt: Raw = NOTHING
    messages: Raw = NOTHING
    instructions: Raw = NOTHING
    input: Raw = NOTHING
    system: Raw = NOTHING
    cache_salt: str | None = None
    session_id: Any = None
    prompt_cache_key: Any = None
    kv_transfer_params: Raw = NOTHING
    previous_response_id: Any = None  # of a response that a replica stores
    store: Any = None


class PreparedRequest(msgspec.Struct, frozen=True, gc=False):
    """The request and its routing data. The exchange frees it, with the body, at the first byte of the answer."""

    request: ClientRequest
    parsed: RequestFields
    client_key: bytes  # the header with the client's own key, for replicas that need none of ours
    prompt: Prompt | None
    num_tokens: int
    body_with_ids: bytes | None = None
    text_digest: str | None = None  # of the tokenizer and template that the ids were made with
    fields: dict[str, Raw] | None = None  # the body's, if it was split

    @property
    def session(self) -> str | None:
        """Return the client's session: a header, or one of two fields."""
        named = self.request.session.decode("latin-1"), self.parsed.session_id, self.parsed.prompt_cache_key
        return next((each[:256] for each in named if isinstance(each, str) and each), None)

    def has_ids_for(self, text_digest: str | None) -> bool:
        """Return whether a replica with this tokenizer and chat template gets token ids: they must be the router's."""
        return self.body_with_ids is not None and text_digest == self.text_digest

    def form_for(self, text_digest: str | None, key_line: bytes) -> tuple[bytes, bytes]:
        """Return the header lines and the body for a replica. `key_line`: the header with the replica's own key, if any."""
        request, form, kind = self.request, self.body_with_ids, _WITH_IDS
        if form is None or not self.has_ids_for(text_digest):
            form, kind = request.body, _JSON
        return request.lines + kind + (key_line or self.client_key), form


class ChatFields(msgspec.Struct):
    """The fields of a chat that its template is given."""

    messages: Raw
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None


class ChatTool(msgspec.Struct):
    function: dict[str, Any]


class KnownMessage(Message, kw_only=True, forbid_unknown_fields=True):
    """A message without other fields."""


_CHAT = msgspec.json.Decoder(ChatFields)
_KNOWN_MESSAGES = msgspec.json.Decoder(list[KnownMessage])
_MESSAGES = msgspec.json.Decoder(list[Message])


class PromptReader:
    def __init__(self, tokenizer: Tokenizer | None = None, template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.segments = SegmentCache(tokenizer) if tokenizer is not None else None
        self.digest = text_digest(tokenizer, template) if tokenizer is not None else None
        self.max_model_len = 0  # the longest context of the replicas; 0: not known yet
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    def is_long(self, path: str, body: bytes) -> bool:
        """Return whether the request must be prepared in a thread, because it would block the event loop for too long."""
        is_slow = path == CHAT and self.template is not None and self.template.is_slow
        return path in PROMPTS and (is_slow or len(body) > INLINE_CHARS)

    def prepare(
        self,
        request: ClientRequest,
        parsed: RequestFields,
        placement: Placement,
        adapter: str | None = None,
        *,
        client_key: bytes = b"",
    ) -> PreparedRequest:
        """Prepare a request. Safe in any thread. `adapter`: the key of the adapter that the model name stands for. Raises
        HttpError for a body that no replica would take."""
        path, body = request.path, request.body
        prompt: Prompt | None = None
        form: bytes | None = None
        num_tokens = len(body) // BYTES_PER_TOKEN if path == EMBEDDINGS else 0
        fields = split_object(body) if self._may_have_ids(path, body, parsed) else None
        is_ours = any(space.fingerprint for space in placement.caches.spaces)
        ids = None if fields is None else self.ids(path, body, parsed, fields, is_ours=is_ours)
        if fields is not None and ids is not None:
            packed, is_exact = ids
            prompt, num_tokens = placement.prepare(packed, parsed.cache_salt, adapter), len(packed) // 4
            if is_exact and self.digest is not None:  # without a digest no replica is known to read this form
                form = token_form.pack(fields, PROMPTS[path][0], packed)
        elif path in PROMPTS:
            text = b"".join([getattr(parsed, name) for name in PROMPTS[path]])
            prompt = placement.prepare(text, parsed.cache_salt, adapter, has_ids=False)
            num_tokens = len(text) // BYTES_PER_TOKEN
        return PreparedRequest(request, parsed, client_key, prompt, num_tokens, form, self.digest, fields)

    def _may_have_ids(self, path: str, body: bytes, parsed: RequestFields) -> bool:
        """Return whether the body must be split to get its token ids; not if it is longer than any replica's context."""
        if path == COMPLETIONS and _is_list(parsed.prompt):
            return True
        limit = MAX_CHARS_PER_TOKEN * self.max_model_len
        return path in (CHAT, COMPLETIONS) and self.segments is not None and not (limit and len(body) > 4 * limit)

    def ids(
        self, path: str, body: bytes, parsed: RequestFields, fields: dict[str, Raw], *, is_ours: bool
    ) -> tuple[bytes, bool] | None:
        """Return the token ids of a request (int32, little-endian), and whether the engine would make the same ids; None
        without a tokenizer, for several prompts, and for a body that only the replica can check. `fields`: the body's.
        `is_ours`: the engine is Penstock's; others show their templates every field of a tool."""
        if path == COMPLETIONS and _is_list(parsed.prompt):
            return _client_ids(parsed.prompt, fields)
        try:
            return self._render(body, fields, is_ours) if path == CHAT else self._complete(parsed.prompt, fields)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return None  # the replica reports the error

    def _complete(self, prompt: Raw, fields: dict[str, Raw]) -> tuple[bytes, bool] | None:
        if bytes(prompt)[:1] != b'"' or self.segments is None:
            return None
        adds = _FLAG.decode(fields.get("add_special_tokens", b"null"))
        is_exact = fields.keys() <= NOT_IN_PROMPT | {"prompt", "add_special_tokens"}
        return self.segments.encode(_TEXT.decode(prompt), adds is not False), is_exact

    def _render(self, body: bytes, fields: dict[str, Raw], is_ours: bool) -> tuple[bytes, bool] | None:
        if self.template is None or self.segments is None:
            return None
        chat = _CHAT.decode(body)
        messages, are_known = _messages(chat.messages)
        tools = chat.tools
        if is_ours and tools:
            tools = show_tools([each.function for each in msgspec.convert(tools, list[ChatTool])], chat.tool_choice)
        options = {"tools": tools, "documents": chat.documents, **rendering(chat)}
        try:
            with limited(RENDER_S if self.is_long(CHAT, body) else TRIAL_S):
                text = chat_prompt(self.template, messages, **options)
        except RenderTimeout:
            self.template.is_slow = True  # later chats are rendered in a thread
            return None
        # The engine reads the reasoning state of a message to be continued from its text.
        is_exact = not chat.continue_final_message and fields.keys() <= NOT_IN_PROMPT | RENDERED
        is_exact = is_exact and are_known and all(map(_is_plain, messages))
        return self.segments.encode(text, bool(chat.add_special_tokens)), is_exact


def _client_ids(prompt: Raw, fields: dict[str, Raw]) -> tuple[bytes, bool] | None:
    """Return the ids that the client sent. Sending them in binary saves the engine from parsing JSON."""
    try:
        ids = array("i", _IDS.decode(prompt))
    except (msgspec.MsgspecError, OverflowError):
        return None  # several prompts, or ids that the replica will refuse
    is_exact = bool(ids) and fields.keys() <= NOT_IN_PROMPT | {"prompt", "add_special_tokens", "echo"}
    return ids.tobytes(), is_exact


def _is_list(prompt: Raw) -> bool:
    return memoryview(prompt)[:1].tobytes() == b"["  # `bytes(prompt)` would copy the whole prompt


def _is_plain(message: Message) -> bool:
    """Return whether every version of the engine renders this message in the same way if it has no other fields."""
    others = (message.reasoning, message.tool_calls, message.tool_call_id)
    return message.role in PLAIN_ROLES and message.content is not None and others == (None, None, None)


def _messages(source: Raw) -> tuple[Sequence[Message], bool]:
    """Return the messages, and whether they have no other fields, which the engine may show to its template."""
    try:
        return _KNOWN_MESSAGES.decode(source), True
    except msgspec.ValidationError:
        return _MESSAGES.decode(source), False
