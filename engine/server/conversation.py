"""A conversation, in the same form for all APIs: the messages for the chat template."""

from typing import Any

from msgspec import Raw

from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.other_fields import decode_lenient
from penstock.engine.server.requests import ChatMessage
from penstock.engine.text.chat_messages import CalledFunction, Message, PastCall, TextPart
from penstock.executor.protocol import ModelInfo

MAX_MESSAGES = 2048
MAX_PAST_CALLS = 128  # calls in one message


class Conversation:
    """The messages of one request. Their paths in the client's request are added to `paths` (Call.paths) if they differ
    from those of the chat API."""

    def __init__(self, size_bytes: int, paths: dict[str, str]) -> None:
        """Create an empty conversation. `size_bytes`: size of the request and of the stored turns that it continues."""
        self.messages: list[Message] = []
        self._calls: list[PastCall] = []  # those of the last message that has calls
        self.paths = paths
        self.size_bytes = size_bytes

    def read(self, raw: Raw, info: ModelInfo, ignored: list[str]) -> None:
        """Decode the messages of a chat request; append the names of ignored fields to `ignored`."""
        check_braces("messages", raw, info)
        messages = decode_lenient(list[ChatMessage], raw, "messages", ignored)
        for index, message in enumerate(messages):
            path = f"messages[{index}]"
            if message.role == "function":
                raise InvalidRequest(f"{path}.role", "the older form of 'tool', which is supported")
            if message.function_call is not None:
                raise InvalidRequest(f"{path}.function_call", "use tool_calls")
            if message.audio is not None:
                raise InvalidRequest(f"{path}.audio", "only text is understood")
        self.messages = [*messages]

    # The other APIs add one part after the other, each with its path in the client's request. Consecutive reasoning,
    # text and calls of an assistant become one message.

    def say(self, path: str, role: str, content: str | list[TextPart], field: str = ".content") -> None:
        """Add the text of a message. `field`: its path relative to `path`."""
        at = self._assistants(path, "content") if role == "assistant" else self._add(path, role)
        self.messages[-1].content = content
        self.paths[f"{at}.content"] = path + field

    def think(self, path: str, text: str) -> None:
        if text:
            self._assistants(path, "content", "tool_calls", "reasoning_content")
            self.messages[-1].reasoning_content = text

    def call(self, path: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        at = self._assistants(path)
        if self.messages[-1].tool_calls is None:
            self.messages[-1].tool_calls = self._calls = []
        self.paths[f"{at}.tool_calls[{len(self._calls)}].function"] = path
        self.paths[f"{at}.tool_calls"] = path  # errors about all calls name the last one
        self._calls.append(PastCall(id=call_id, function=CalledFunction(name, arguments)))

    def result(self, path: str, call_id: str, content: str | list[TextPart], id_field: str) -> None:
        """Add a message with the result of a call. `id_field`: the client's name of `tool_call_id`."""
        at = self._add(path, "tool")
        self.messages[-1] = Message(role="tool", tool_call_id=call_id, content=content)
        self.paths[f"{at}.tool_call_id"] = f"{path}.{id_field}"

    def _add(self, path: str, role: str) -> str:
        at = f"messages[{len(self.messages)}]"
        self.messages.append(Message(role=role))
        self.paths[at] = path
        return at

    def _assistants(self, path: str, *without: str) -> str:
        """Return the path of the last message if it is the assistant's and has none of these fields; else add one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or any(getattr(last, name) is not None for name in without):
            return self._add(path, "assistant")
        return f"messages[{len(self.messages) - 1}]"

    @property
    def last_text(self) -> str:
        """The text of the last message, which the answer may continue. Rendering the messages has checked its form."""
        content = (self.messages[-1].content or "") if self.messages else ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def check(self) -> None:
        """Raise InvalidRequest unless only assistant messages have calls and tool messages answer earlier calls."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest("messages", f"{len(self.messages)} given; 1 to {MAX_MESSAGES} are allowed")
        called: set[str | None] = set()
        for index, message in enumerate(self.messages):
            field, role, call_id = f"messages[{index}]", message.role, message.tool_call_id
            ids = [call.id for call in message.tool_calls or ()]
            if ids and role != "assistant":
                raise InvalidRequest(
                    f"{field}.tool_calls", f"only assistant messages have calls; the role is {clip(role)!r}"
                )
            if len(ids) > MAX_PAST_CALLS:
                raise InvalidRequest(f"{field}.tool_calls", f"{len(ids)} calls; at most {MAX_PAST_CALLS} are allowed")
            if len({*ids}) < len(ids):
                raise InvalidRequest(f"{field}.tool_calls", "two calls have the same id")
            called.update(ids)
            if role != "tool" and call_id is not None:
                raise InvalidRequest(f"{field}.tool_call_id", f"only tool messages have it; the role is {clip(role)!r}")
            if role == "tool" and call_id is None:
                raise InvalidRequest(f"{field}.tool_call_id", "the field is required in a tool's message")
            if call_id is not None and call_id not in called:
                raise InvalidRequest(f"{field}.tool_call_id", f"{clip(call_id)!r} is not the id of an earlier call")


def check_braces(field: str, raw: Raw, info: ModelInfo) -> None:
    """Raise InvalidRequest for more objects and lists than can fit the context, since building half a million of them
    would block all other requests. A brace or bracket either starts a message or one of its parts, or it is text, and
    hardly any tokenizer has tokens with more than four of them."""
    limit = 4 * (MAX_MESSAGES + info.max_model_len)
    value = bytes(raw)
    if (count := value.count(b"{") + value.count(b"[")) > limit:
        what = f"{count} objects, lists, braces and brackets; at most {limit} can fit the context"
        raise InvalidRequest(field, what)
