"""A conversation, in the same form for all APIs: the messages for the chat template."""

from typing import Any

import msgspec
from msgspec import Raw

from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.lenient import decode_lenient
from penstock.engine.server.requests import Message
from penstock.executor.protocol import ModelInfo

MAX_MESSAGES = 2048
MAX_PAST_CALLS = 128  # calls in one message


class Conversation:
    """The messages of one request, as dictionaries in the form of OpenAI's chat API. Their paths in the client's request
    are added to `paths` (Call.paths) if they differ."""

    def __init__(self, size_bytes: int, paths: dict[str, str]) -> None:
        """Create an empty conversation. `size_bytes`: size of the request and of the stored turns that it continues."""
        self.messages: list[dict[str, Any]] = []
        self.paths = paths
        self.size_bytes = size_bytes

    def read(self, raw: Raw, info: ModelInfo, ignored: list[str]) -> None:
        """Decode the messages of a chat request; append the names of ignored fields to `ignored`."""
        check_braces("messages", raw, info)
        self.messages = [
            _plain(f"messages[{index}]", message)
            for index, message in enumerate(decode_lenient(list[Message], raw, "messages", ignored))
        ]

    # The other APIs add one part after the other, each with its path in the client's request. Consecutive reasoning,
    # text and calls of an assistant become one message.

    def say(self, path: str, role: str, content: str | list[dict[str, str]], field: str = ".content") -> None:
        """Add the text of a message. `field`: its path relative to `path`."""
        at = self._assistants(path, "content") if role == "assistant" else self._add(path, role)
        self.messages[-1]["content"] = content
        self.paths[f"{at}.content"] = path + field

    def think(self, path: str, text: str) -> None:
        if text:
            self._assistants(path, "content", "tool_calls", "reasoning_content")
            self.messages[-1]["reasoning_content"] = text

    def call(self, path: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        at = self._assistants(path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.paths[f"{at}.tool_calls[{len(calls)}].function"] = path
        self.paths[f"{at}.tool_calls"] = path  # errors about all calls name the last one
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, path: str, call_id: str, content: str | list[dict[str, str]], id_field: str) -> None:
        """Add a message with the result of a call. `id_field`: the client's name of `tool_call_id`."""
        at = self._add(path, "tool")
        self.messages[-1] |= {"tool_call_id": call_id, "content": content}
        self.paths[f"{at}.tool_call_id"] = f"{path}.{id_field}"

    def _add(self, path: str, role: str) -> str:
        at = f"messages[{len(self.messages)}]"
        self.messages.append({"role": role})
        self.paths[at] = path
        return at

    def _assistants(self, path: str, *without: str) -> str:
        """Return the path of the last message if it is the assistant's and has none of these fields; else add one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self.messages[-1].keys() & set(without):
            return self._add(path, "assistant")
        return f"messages[{len(self.messages) - 1}]"

    @property
    def last_text(self) -> str:
        """The text of the last message, which the answer may continue. Rendering the messages has checked its form."""
        content = (self.messages[-1].get("content") or "") if self.messages else ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    def check(self) -> None:
        """Raise InvalidRequest unless only assistant messages have calls and tool messages answer earlier calls."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest("messages", f"{len(self.messages)} given; 1 to {MAX_MESSAGES} are allowed")
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            field, role = f"messages[{index}]", message["role"]
            ids = [call["id"] for call in message.get("tool_calls", ())]
            if ids and role != "assistant":
                raise InvalidRequest(
                    f"{field}.tool_calls", f"only assistant messages have calls; the role is {clip(role)!r}"
                )
            if len(ids) > MAX_PAST_CALLS:
                raise InvalidRequest(f"{field}.tool_calls", f"{len(ids)} calls; at most {MAX_PAST_CALLS} are allowed")
            if len({*ids}) < len(ids):
                raise InvalidRequest(f"{field}.tool_calls", "two calls have the same id")
            called.update(ids)
            _check_result(f"{field}.tool_call_id", role, message.get("tool_call_id"), called)


def check_braces(field: str, raw: Raw, info: ModelInfo) -> None:
    """Raise InvalidRequest for more objects and lists than can fit the context, since building half a million of them
    would block all other requests. A brace or bracket either starts a message or one of its parts, or it is text, and
    hardly any tokenizer has tokens with more than four of them."""
    limit = 4 * (MAX_MESSAGES + info.max_model_len)
    value = bytes(raw)
    if (count := value.count(b"{") + value.count(b"[")) > limit:
        what = f"{count} objects, lists, braces and brackets; at most {limit} can fit the context"
        raise InvalidRequest(field, what)


def _check_result(field: str, role: str, call_id: str | None, called: set[str]) -> None:
    if role != "tool":
        if call_id is not None:
            raise InvalidRequest(field, f"only tool messages have it; the role is {clip(role)!r}")
    elif call_id is None:
        raise InvalidRequest(field, "the field is required in a tool's message")
    elif call_id not in called:
        raise InvalidRequest(field, f"{clip(call_id)!r} is not the id of an earlier call")


def _plain(path: str, message: Message) -> dict[str, Any]:
    """Return a message as a dictionary for the template, without unset fields."""
    if message.role == "function":
        raise InvalidRequest(f"{path}.role", "the older form of 'tool', which is supported")
    for field, reason in (("function_call", "use tool_calls"), ("audio", "only text is understood")):
        if getattr(message, field) is not None:
            raise InvalidRequest(f"{path}.{field}", reason)
    plain = {
        name: msgspec.to_builtins(value)
        for name, value in msgspec.structs.asdict(message).items()
        if value is not None and name not in ("refusal", "annotations")
    }
    for call in plain.get("tool_calls", ()):
        del call["index"], call["custom"]
    if (reasoning := plain.pop("reasoning", None)) is not None:
        plain.setdefault("reasoning_content", reasoning)
    return plain
