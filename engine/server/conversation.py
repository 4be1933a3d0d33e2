"""A conversation as the server handles it, whichever API it came by: the messages that the chat template is given, and the
client's own names for the parts of the request, for errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Raw

from penstock.engine.http.body import decode
from penstock.engine.http.errors import clip
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.requests import Message
from penstock.engine.text.template_messages import check_messages
from penstock.executor.protocol import ModelInfo

MAX_MESSAGES = 2048
MAX_PAST_CALLS = 128  # in one message


class Conversation:
    """`messages` are plain dictionaries in the form of OpenAI's chats. `paths` maps the chat API's name of a field to the client's
    name, where the two differ; a name stands for everything beneath it."""

    def __init__(self, size_bytes: int, paths: Mapping[str, str] | None = None) -> None:
        """Begin an empty conversation. `size_bytes`: of the request, with the stored turns that belong to it."""
        self.messages: list[dict[str, Any]] = []
        self.paths = dict(paths or {})
        self.size_bytes = size_bytes

    def read(self, raw: Raw, info: ModelInfo) -> None:
        """Decode the messages of a chat request."""
        check_braces("messages", raw, info)
        self.messages = [
            _plain(f"messages[{place}]", message)
            for place, message in enumerate(decode(list[Message], raw, "messages"))
        ]

    # The other APIs add one part after the other, each with its place in the client's request. An assistant's reasoning,
    # text and calls in a row become one message.

    def say(self, place: str, role: str, content: str | list[dict[str, str]], field: str = ".content") -> None:
        """Add the text of a message. `field`: where it stands in `place`."""
        at = self._assistants(place, "content", "tool_calls") if role == "assistant" else self._add(place, role)
        self.messages[-1]["content"] = content
        self.paths[f"{at}.content"] = place + field

    def think(self, place: str, text: str) -> None:
        if text:
            self._assistants(place, "content", "tool_calls", "reasoning_content")
            self.messages[-1]["reasoning_content"] = text

    def call(self, place: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        at = self._assistants(place)
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.paths[f"{at}.tool_calls[{len(calls)}].function"] = place
        self.paths[f"{at}.tool_calls"] = place  # what is said of all of them concerns the last one
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, place: str, call_id: str, content: str | list[dict[str, str]], id_field: str) -> None:
        """Add the result of a call. `id_field`: the client's name of `tool_call_id`."""
        at = self._add(place, "tool")
        self.messages[-1] |= {"tool_call_id": call_id, "content": content}
        self.paths[f"{at}.tool_call_id"] = f"{place}.{id_field}"

    def _add(self, place: str, role: str) -> str:
        at = f"messages[{len(self.messages)}]"
        self.messages.append({"role": role})
        self.paths[at] = place
        return at

    def _assistants(self, place: str, *without: str) -> str:
        """Return the name of the assistant's message at the end, if it has none of these fields yet; else add one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self.messages[-1].keys() & set(without):
            return self._add(place, "assistant")
        return f"messages[{len(self.messages) - 1}]"

    @property
    def last_text(self) -> str:
        """The text of the last message, for an answer that goes on from it."""
        return str(check_messages(self.messages[-1:])[0]["content"]) if self.messages else ""

    def check(self) -> None:
        """Raise InvalidRequest unless calls stand in the assistant's messages and every tool's message answers an earlier call."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest("messages", f"{len(self.messages)} given; 1 to {MAX_MESSAGES} are allowed")
        called: set[str] = set()
        for place, message in enumerate(self.messages):
            field, role = f"messages[{place}]", message["role"]
            ids = [call["id"] for call in message.get("tool_calls", ())]
            if ids and role != "assistant":
                raise InvalidRequest(f"{field}.tool_calls", f"only an assistant calls; the role is {clip(role)!r}")
            if len(ids) > MAX_PAST_CALLS:
                raise InvalidRequest(f"{field}.tool_calls", f"{len(ids)} calls; at most {MAX_PAST_CALLS} are allowed")
            if len({*ids}) < len(ids):
                raise InvalidRequest(f"{field}.tool_calls", "two calls have the same id")
            called.update(ids)
            _check_result(f"{field}.tool_call_id", role, message.get("tool_call_id"), called)

    @contextmanager
    def named_by_client(self) -> Iterator[None]:
        """Give the fields in what is refused the client's names."""
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(self._client_path(error.field), error.message) from None

    def _client_path(self, field: str) -> str:
        """Replace the longest beginning of `field` that has another name."""
        end = len(field)
        while end > 0:
            if (found := self.paths.get(field[:end])) is not None:
                return found + field[end:]
            end = max(field.rfind(".", 0, end), field.rfind("[", 0, end))
        return field


def check_braces(field: str, raw: Raw, info: ModelInfo) -> None:
    """Raise InvalidRequest for more objects than the context has room for: building half a million of them holds up all other
    requests. A brace is the start of a message or of one of its parts, or it is text, of which hardly any tokenizer takes more
    than four braces for a token."""
    limit = 4 * (MAX_MESSAGES + info.max_model_len)
    if bytes(raw).count(b"{") > limit:
        raise InvalidRequest(field, f"more than {limit} objects or braces cannot fit the context")


def _check_result(field: str, role: str, call_id: str | None, called: set[str]) -> None:
    if role != "tool":
        if call_id is not None:
            raise InvalidRequest(field, f"only a tool answers a call; the role is {clip(role)!r}")
    elif call_id is None:
        raise InvalidRequest(field, "the field is required in a tool's message")
    elif call_id not in called:
        raise InvalidRequest(field, f"{clip(call_id)!r} is the id of no call before it")


def _plain(place: str, message: Message) -> dict[str, Any]:
    """Return a message as the template takes it, without the fields that were not set."""
    if message.role == "function":
        raise InvalidRequest(f"{place}.role", "the older form of 'tool', which is served")
    for field, what in (("function_call", "use tool_calls"), ("audio", "only text is understood")):
        if getattr(message, field) is not None:
            raise InvalidRequest(f"{place}.{field}", what)
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    others = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
    }
    plain |= {name: value for name, value in others.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": msgspec.structs.asdict(call.function)}
            for call in message.tool_calls
        ]
    return plain
