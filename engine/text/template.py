"""Chat templates: from a conversation to the text that the model was trained to continue.

The sources come with the model or from the operator's command line, never from a request. They render in
engine/text/sandbox.py; what a template raises, and where it fails on the messages it was given, the user is told
as a fault of `messages`.
"""

import json
import secrets
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError

from penstock.engine.model_files import ModelFiles, ModelRefused
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.sandbox import BUDGET, Budget, Refused, Sandbox, TooMuch

MAX_SOURCE_CHARS = 1 << 20
MAX_ROLE_CHARS = 64
MAX_DEPTH = 64  # of nesting in what a template is given
MAX_ERROR_CHARS = 300

# What a template's arithmetic on unexpected messages may raise, beside Jinja's own errors.
FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

# Names under which a message's reasoning travels; templates read one of the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class ChatTemplate:
    """The template or templates of a model. Safe to use from several threads."""

    def __init__(self, sources: str | dict[str, str], special_tokens: dict[str, str] | None = None) -> None:
        """`sources`: one template, or several by name: "default", and "tool_use" where tools are given."""
        named = {"default": sources} if isinstance(sources, str) else sources
        environment = Sandbox()
        self._templates = {name: _compile(environment, name, source) for name, source in named.items()}
        self._special_tokens = special_tokens or {}

    def render(
        self,
        messages: list[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt. Raises InvalidRequest for messages that are malformed or that the template refuses.

        With `continue_final_message` it ends within the last message, whose text the model goes on writing.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
        for name in ("messages", *self._special_tokens):
            if name in template_kwargs:
                raise InvalidRequest("chat_template_kwargs", f"{name!r} is given by the server and cannot be set")
        chat = check_messages(messages)
        mark = _mark_end(chat) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **_plain(template_kwargs, "chat_template_kwargs"),
            "messages": chat,
            "tools": _objects(tools, "tools"),
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(self._template(bool(tools)), variables)
        return _cut(text, mark) if mark else text

    def _template(self, has_tools: bool) -> Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest("messages", f"the model has chat templates only for special uses ({names})")
        return self._templates["default"]


def load_template(files: ModelFiles, override: str | None = None) -> ChatTemplate | None:
    """The model's chat template, or the operator's: a file, or the template itself. None: the model has none."""
    if files.kind == "gguf":
        from penstock.engine.text.gguf_tokenizer import read_template_parts

        special_tokens, sources = read_template_parts(files.path)
    else:
        from penstock.engine.text.hf_tokenizer import read_template_parts as read_parts

        special_tokens, sources = read_parts(files.path)
    if override is not None:
        sources = {"default": _operators(override)}
    return ChatTemplate(sources, special_tokens) if sources else None


def _operators(override: str) -> str:
    if "{" in override:
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        raise ModelRefused(f"chat template: {override!r} is neither a file nor a template (which has braces)")
    return path.read_text(encoding="utf-8")


def _compile(environment: Sandbox, name: str, source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelRefused(f"chat template {name!r}: {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ModelRefused(
            f"chat template {name!r} does not compile: {_short(error)}; give another one with --chat-template"
        ) from None


def _run(template: Template, variables: dict[str, Any]) -> str:
    try:
        return template.render({**variables, BUDGET: Budget()})
    except Refused as error:
        raise InvalidRequest("messages", f"the model's chat template refuses them: {_short(error)}") from None
    except TooMuch as error:
        raise InvalidRequest("messages", f"the model's chat template was stopped: {_short(error)}") from None
    except FAULTS as error:
        raise InvalidRequest(
            "messages", f"the model's chat template cannot render them: {type(error).__name__}: {_short(error)}"
        ) from None


def _short(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 1]}…"


# -- messages ----------------------------------------------------------------------------------------------


def check_messages(messages: list[Message]) -> list[Message]:
    """A copy in the form that templates expect: text in one string, arguments of calls as objects."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "a list of at least one message is expected")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Message, field: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(field, f"{type(message).__name__} given; an object with role and content is expected")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequest(f"{field}.role", f"a name of 1 to {MAX_ROLE_CHARS} characters is expected")
    content = _text(message.get("content"), f"{field}.content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    plain: Message = {"role": role, "content": content, **_plain(rest, field)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{place}]")
            for place, call in enumerate(_objects(message["tool_calls"], f"{field}.tool_calls") or [])
        ]
    reasoning = next((plain[name] for name in REASONING if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _text(content: object, field: str) -> str:
    """OpenAI's content: a string, a list of parts, or nothing beside tool calls."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _check_unicode(content, field)
    if not isinstance(content, list):
        raise InvalidRequest(field, f"{type(content).__name__} given; a string or a list of text parts is expected")
    return "\n".join(_part(part, f"{field}[{place}]") for place, part in enumerate(content))


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return _check_unicode(part, field)
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{field}.type", f"{str(kind)[:40]!r} is not supported; only 'text' is")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "a string is expected")
    return _check_unicode(text, f"{field}.text")


def _tool_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """OpenAI's arguments are a string of JSON; templates print an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}.function.arguments", "not valid JSON") from None
    return {**call, "function": {**function, "arguments": _plain(arguments, f"{field}.function.arguments")}}


def _objects(values: object, field: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(field, "a list of objects is expected")
    plain: list[dict[str, Any]] = _plain(values, field)
    return plain


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy of JSON data. Nothing else reaches a template: an object's methods are not the sandbox's to judge."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(field, f"nested more than {MAX_DEPTH} levels deep")
    if value is None or type(value) in (int, float, bool):
        return value
    if type(value) is str:
        return _check_unicode(value, field)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field, depth + 1) for item in value]
    raise InvalidRequest(field, f"holds a {type(value).__name__}; only JSON values are allowed")


def _check_unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"half of a surrogate pair at character {error.start}; not Unicode") from None
    return text


# -- continuing the last message ---------------------------------------------------------------------------


def _mark_end(chat: list[Message]) -> str:
    """Write a mark behind the last message's text. Its last character is a space: whether the template keeps that
    space shows whether it trims what it prints."""
    if not chat[-1]["content"]:
        raise InvalidRequest("continue_final_message", "the last message has no text to continue")
    mark = f"endoftext{secrets.token_hex(8)} "
    chat[-1]["content"] += mark
    return mark


def _cut(text: str, mark: str) -> str:
    place = text.rfind(mark.rstrip())
    if place < 0:
        raise InvalidRequest("continue_final_message", "the model's chat template does not print the last message")
    cut = text[:place]
    return cut if text.startswith(mark, place) else cut.rstrip()
