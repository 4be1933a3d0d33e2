"""Chat templates: render a conversation into the prompt format that the model was trained on.

The sources come with the model or from the operator's command line, never from a request. They run in the environment
of template_environment.py. Any error that a template raises is reported as an error of the field `messages`.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.text import template_messages
from penstock.engine.text.chat_messages import Message, PlainMessage, objects, plain, plain_messages
from penstock.engine.text.render_time import RenderTimeout, limited
from penstock.engine.text.tokenizer import Tokenizer, read_template

# Test messages that show how a template treats system messages; see ChatTemplate._prints_mark.
SYSTEM: PlainMessage = {"role": "system", "content": "first"}
USER: PlainMessage = {"role": "user", "content": "hello"}
ASSISTANT: PlainMessage = {"role": "assistant", "content": "hello"}
MARK = "b9f1c7e2"
# Arguments of ChatTemplate.render, which can have no default.
NO_DEFAULTS = ("messages", "tools", "tools_as_text", "add_generation_prompt", "continue_final_message")

# Found in templates that print call arguments unchanged, so they must be JSON text, and in those that take objects.
_PRINTED = re.compile(
    r"(?:[+~]|\{\{-?)\s*\w+(?:\.function|\['function'\])?(?:\.arguments|\['arguments'\])\s*(?:[+~]|-?\}\})"
)
_UNPACKED = re.compile(r"arguments(?:'\])?\s*(?:is\s|\|)")


class ChatTemplate:
    """The chat template or templates of a model. Thread-safe."""

    def __init__(
        self,
        sources: str | dict[str, str],
        special_tokens: dict[str, str] | None = None,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        """Compile `sources`: one template, or several by name ("default", and "tool_use" for requests with tools).
        `defaults` are variables that a request may override."""
        from penstock.engine.text.template_environment import compile_templates  # jinja2 takes long to import

        named = {"default": sources} if isinstance(sources, str) else sources
        self.sources = named
        self._templates = compile_templates(named)
        self._special_tokens = special_tokens or {}
        self._variables = {"documents": None, **self._special_tokens, **(defaults or {})}
        said = json.dumps([named, self._special_tokens | (defaults or {})], sort_keys=True)
        self.digest = hashlib.sha256(said.encode()).hexdigest()
        self.source = "\n".join(named.values())  # searched for the model's tool call and reasoning marks
        self.is_slow = False  # set once a rendering took too long for the event loop
        self.has_tools = re.search(r"\btools\b", self.source) is not None
        self._prints_arguments = bool(_PRINTED.search(self.source)) and not _UNPACKED.search(self.source)
        self._refuses_both = "Cannot pass both content and thinking" in self.source  # gpt-oss, in messages with calls
        self._has_developer = re.search(r"\bdeveloper\b", self.source) is not None

    @limited()
    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        tools_as_text: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt; raise InvalidRequest for messages that are malformed or that the template refuses.

        With `continue_final_message`, the prompt ends within the last message, so that the model continues its text.
        With `tools_as_text`, tools and their calls are written into the messages, for a template without tool support.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message", "cannot be combined with add_generation_prompt")
        for name in ("messages", *self._special_tokens):
            if name in template_kwargs:
                raise InvalidRequest("chat_template_kwargs", f"{name!r} is given by the server and cannot be set")
        chat, tools = self._with_system(plain_messages(messages)), objects(tools, "tools")
        if continue_final_message and chat[-1].get("tool_calls"):
            raise InvalidRequest("continue_final_message", "the last message has calls; its text cannot be continued")
        if tools_as_text:
            chat, tools = template_messages.without_tools(chat, tools), None
        elif self._prints_arguments:
            chat = template_messages.with_arguments_as_text(chat)
        if self._refuses_both:
            chat = template_messages.with_text_as_reasoning(chat)
        mark = _mark_end(chat) if continue_final_message else ""
        variables = {
            **self._variables,
            **plain(template_kwargs, "chat_template_kwargs"),
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._template(bool(tools))(variables)
        return _cut(text, mark) if mark else text

    def _with_system(self, chat: list[PlainMessage]) -> list[PlainMessage]:
        """Rewrite system and developer messages so that this template prints all of them."""
        roles = [message["role"] for message in chat]
        is_mapped = "developer" in roles and not self._has_developer
        if is_mapped:
            # Most templates print nothing for an unknown role.
            chat = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat]
        num_system = sum(message["role"] in template_messages.SYSTEM_ROLES for message in chat)
        if not is_mapped and (num_system < 2 or (self._takes_two_first and self._takes_later)):
            return chat
        return template_messages.with_system_first(chat, takes_later=self._takes_later)

    @cached_property
    def _takes_two_first(self) -> bool:
        return self._prints_mark(SYSTEM)

    @cached_property
    def _takes_later(self) -> bool:
        return self._prints_mark(SYSTEM, USER, ASSISTANT)

    def _prints_mark(self, *before: PlainMessage) -> bool:
        """Render a test chat; return whether the template prints a system (or supported developer) message behind these."""
        for role in template_messages.SYSTEM_ROLES if self._has_developer else template_messages.SYSTEM_ROLES[:1]:
            chat = [*before, {"role": role, "content": MARK}, USER]
            variables = {"messages": chat, "tools": None, "add_generation_prompt": True}
            try:
                if MARK not in self._template(False)({**self._variables, **variables}):
                    return False
            except RenderTimeout:
                raise
            except InvalidRequest:
                return False
        return True

    def _template(self, has_tools: bool) -> Callable[[dict[str, Any]], str]:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest("messages", f"the model has chat templates only for special uses ({names})")
        return self._templates["default"]


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return a digest of 32 hexadecimal characters over everything that determines the token ids of a text. Two processes
    with equal digests turn a request into the same token ids: the router sends ids only to an engine with its digest."""
    digest = hashlib.sha256()
    for part in (tokenizer.backend.to_str(), "" if template is None else template.digest):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def load_template(
    tokenizer: Tokenizer, override: str | None = None, defaults: dict[str, Any] | None = None
) -> ChatTemplate | None:
    """Return the operator's template (`override`: a file name or template text), else the tokenizer's, or None if there
    is none. `defaults` are the operator's defaults of its variables."""
    sources = tokenizer.chat_templates
    if override is not None:
        path = Path(override).expanduser()
        if "{" not in override and not path.is_file():
            raise ModelError(f"chat template: {override!r} is neither a file nor a template (which has braces)")
        sources = {"default": override if "{" in override else read_template("chat template", path)}
    if defaults:
        _check_defaults(defaults, {*NO_DEFAULTS, *tokenizer.special_tokens}, bool(sources))
    return ChatTemplate(sources, tokenizer.special_tokens, defaults) if sources else None


def _check_defaults(defaults: dict[str, Any], refused: set[str], has_template: bool) -> None:
    option = "default_chat_template_kwargs"
    if not has_template:
        raise ModelError(f"{option}: {sorted(defaults)[0]!r} given, and the model has no chat template")
    if names := sorted(refused & defaults.keys()):
        raise ModelError(f"{option}: {names[0]!r} is given by the server and cannot have a default")
    try:
        plain(defaults, option)
    except InvalidRequest as error:
        raise ModelError(str(error)) from None


def _mark_end(chat: list[PlainMessage]) -> str:
    """Append a mark to the last message's text and return it. The mark ends with a space, which shows whether the
    template trims the text."""
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
