"""The ways in which models write calls, and which of them a model was trained on.

    hermes       <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>     Qwen 2.5 and 3, Hermes, ChatML models
    llama3_json  {"name": "f", "parameters": {…}}, or behind <|python_tag|>      Llama 3.1 to 3.3
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                Mistral until 2024
                 [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…                             Mistral since

A format reads what stands around the arguments (`head`, `after`); reader.py reads the arguments and lark.py makes a
model write them. `head` and `after` get the text and a place in it and answer None where more text could change the
answer, and only where a bounded length of it was looked at.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from penstock.engine.tools.scan import MAX_FRAME_CHARS, Head, Malformed, object_head, skip_blank

NAMES = ("hermes", "llama3_json", "mistral")

_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}+")


class After(NamedTuple):
    """What follows a call: another one without a mark of its own, or text. `end` is where that begins."""

    end: int
    is_call: bool = False


class Written(NamedTuple):
    """How a model is made to write calls: `start`, one or more calls with `join` between them, `end`."""

    start: str
    before_name: str
    before_arguments: str
    after_arguments: str
    join: str
    end: str


class Format(Protocol):
    """`marks` open calls; `punctuation` are further texts that may be tokens of their own. `is_bare`: an answer that
    begins with a brace may be a call without a mark. `has_many`: an answer may have several calls. `id_length`: what
    the template accepts as the id of a call."""

    name: str
    marks: tuple[str, ...]
    punctuation: tuple[str, ...]
    is_bare: bool
    has_many: bool
    id_length: int
    written: Written

    def head(self, text: str, at: int, is_first: bool) -> Head | None:
        """Read a call up to its arguments. `is_first`: it stands right behind a mark. Raises Malformed."""
        ...

    def after(self, text: str, at: int, head: Head) -> After | None:
        """Read what separates a finished call from what follows; blanks have been passed over."""
        ...


class Function(NamedTuple):
    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = True  # a schema that no grammar can express is refused, not loosened


class Calls(NamedTuple):
    """What an answer may call. `must`: it is a call and nothing else. `many`: one after the other."""

    form: Format
    functions: Sequence[Function]
    must: bool
    many: bool


class Hermes:
    name = "hermes"
    marks: tuple[str, ...] = ("<tool_call>",)
    punctuation: tuple[str, ...] = ("</tool_call>",)
    is_bare = False
    has_many = True
    id_length = 24
    written = Written(
        "<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n<tool_call>", ""
    )  # fmt: skip

    def head(self, text: str, at: int, is_first: bool) -> Head | None:
        return object_head(text, at, "arguments")

    def after(self, text: str, at: int, head: Head) -> After | None:
        end = _passed(text, at, "</tool_call>")
        return None if end is None else After(end)


class Llama:
    name = "llama3_json"
    marks: tuple[str, ...] = ("<|python_tag|>",)
    punctuation: tuple[str, ...] = ()
    is_bare = True
    has_many = False  # the template refuses a history with more than one; `;` between them is read nevertheless
    id_length = 24
    written = Written("", '{"name": "', '", "parameters": ', "}", "; ", "")

    def head(self, text: str, at: int, is_first: bool) -> Head | None:
        return object_head(text, at, "parameters")

    def after(self, text: str, at: int, head: Head) -> After | None:
        return _next_object(text, at, ";")


class Mistral:
    """Reads both forms; `has_args` says that the model knows the newer one, and makes it write that."""

    name = "mistral"
    marks: tuple[str, ...] = ("[TOOL_CALLS]",)
    punctuation: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")
    is_bare = False
    has_many = True
    id_length = 9  # its templates refuse any other

    def __init__(self, has_args: bool) -> None:
        self.has_args = has_args
        objects = Written("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]")
        self.written = Written("[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]", "") if has_args else objects

    def head(self, text: str, at: int, is_first: bool) -> Head | None:
        if not is_first:
            return object_head(text, at, "arguments")
        place = skip_blank(text, at)
        if place - at > MAX_FRAME_CHARS:
            raise Malformed(place)
        if place == len(text):
            return None
        if text[place] != "[":
            return _bare_head(text, place)
        brace = skip_blank(text, place + 1)
        if brace - at > MAX_FRAME_CHARS or (brace < len(text) and text[brace] != "{"):
            raise Malformed(place)
        return object_head(text, brace, "arguments")

    def after(self, text: str, at: int, head: Head) -> After | None:
        if not head.has_tail:
            return After(at)
        return After(at + 1) if text[at] == "]" else _next_object(text, at, ",")


def detect(source: str, has_tools: bool, has_args: bool) -> Format | None:
    """The format that a chat template writes calls in; None where it is none of ours.

    A template that knows no tools gets them as text (engine/text/tool_prompt.py), in the form of Hermes.
    """
    if not has_tools:
        return Hermes()
    if "[TOOL_CALLS]" in source:
        return Mistral(has_args or "[ARGS]" in source)
    if "<function=" in source or "<arg_key>" in source:  # as <tool_call> in Qwen 3 Coder and GLM, but not JSON
        return None
    if "<tool_call>" in source:
        return Hermes()
    if "<|python_tag|>" in source or ("<|eot_id|>" in source and '"parameters"' in source):
        return Llama()
    return None


def named(name: str, source: str, has_args: bool) -> Format:
    """The format of this name, one of NAMES."""
    if name == "mistral":
        return Mistral(has_args or "[ARGS]" in source)
    return Hermes() if name == "hermes" else Llama()


def _passed(text: str, at: int, mark: str) -> int | None:
    """The place behind `mark` if it stands here, else this place."""
    if text.startswith(mark, at):
        return at + len(mark)
    return None if mark.startswith(text[at : at + len(mark)]) else at


def _next_object(text: str, at: int, separator: str) -> After | None:
    if text[at] != separator:
        return After(at)
    brace = skip_blank(text, at + 1)
    if brace - at > MAX_FRAME_CHARS:
        return After(at)
    if brace == len(text):
        return None
    return After(brace, True) if text[brace] == "{" else After(at)


def _bare_head(text: str, at: int) -> Head | None:
    """`f[ARGS]{`, `f[CALL_ID]abc[ARGS]{` or `f{`"""
    name = _run(text, at)
    end = None if name is None else _passed(text, at + len(name), "[CALL_ID]")
    if name is None or end is None:
        return None
    if end > at + len(name):
        call_id = _run(text, end)
        if call_id is None:
            return None
        end += len(call_id)
    end = _passed(text, end, "[ARGS]")
    brace = len(text) if end is None else skip_blank(text, end)
    if brace - at > MAX_FRAME_CHARS:
        raise Malformed(at + len(name))
    if brace == len(text):
        return None
    if text[brace] != "{":
        raise Malformed(at + len(name))
    return Head(name, brace, has_tail=False)


def _run(text: str, at: int) -> str | None:
    """A name or an id, when it is certain where it ends."""
    found = _RUN.match(text, at)
    if found is None:
        if at < len(text):
            raise Malformed(at)
        return None
    return None if found.end() == len(text) else found[0]
