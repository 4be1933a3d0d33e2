"""Renders a chat into its prompt, for the server, the router and `LLM`, so that all three produce the same prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.text.chat_messages import Message
from penstock.engine.text.template import ChatTemplate

MAX_CHARS_PER_TOKEN = 128  # a text longer than this times the context length is refused before it is tokenized
INLINE_CHARS = 2048  # up to this length, tokenizing on the event loop costs about as much as using a thread
# Request fields that control how the chat is rendered, and names that chat_template_kwargs may not set.
RENDERING = ("add_generation_prompt", "continue_final_message", "reasoning_effort", "chat_template_kwargs")
NOT_VARIABLES = frozenset(RENDERING) - {"chat_template_kwargs"} | {"tools", "tools_as_text"}


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    reasoning_effort: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    documents: list[dict[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Render the messages; `options` is passed on to `template.render`. For a template without tool support, tools and
    their calls are rendered as text, since it would drop them. Raise InvalidRequest for invalid messages or options."""
    switch = {} if reasoning_effort is None else thinking_switch(reasoning_effort != "none")
    sources = {} if documents is None else {"documents": documents}
    variables: dict[str, Any] = {**sources, **switch, **(chat_template_kwargs or {})}
    for name in NOT_VARIABLES & variables.keys():
        raise InvalidRequest("chat_template_kwargs", f"{name!r} cannot be set there")
    if reasoning_effort not in (None, "none"):
        variables["reasoning_effort"] = reasoning_effort
    continues = bool(continue_final_message)
    opens = not continues if add_generation_prompt is None else add_generation_prompt
    return template.render(
        messages,
        add_generation_prompt=opens,
        continue_final_message=continues,
        tools_as_text=not template.has_tools,
        **options,
        **variables,
    )


def show_tools(functions: Iterable[Mapping[str, Any]], tool_choice: object) -> list[dict[str, Any]] | None:
    """Return the functions in the form that chat templates expect, without unset fields; None if none can be called."""
    shown = [
        {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
        for function in functions
    ]
    return None if tool_choice == "none" or not shown else [{"type": "function", "function": each} for each in shown]


def thinking_switch(is_on: bool) -> dict[str, bool]:
    """Return the template variables that turn thinking on or off."""
    return {"enable_thinking": is_on, "thinking": is_on}


def rendering(request: object) -> dict[str, Any]:
    """Return the rendering fields of a request as keyword arguments for `chat_prompt`."""
    return {name: getattr(request, name) for name in RENDERING}
