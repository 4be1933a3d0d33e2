"""The ways in which models write calls, and which of them a model was trained on.

    hermes         <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>     Qwen 2.5 and 3, Hermes, ChatML models
    llama3_json    {"name": "f", "parameters": {…}}, or behind <|python_tag|>      Llama 3.1 to 3.3
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                Mistral until 2024
                   [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…                             Mistral since
    qwen2_5_coder  the same object between ```json and ```, alone, in <tools>      Qwen 2.5 Coder
                   or in <tool_call>

A format reads what stands around the arguments (`head`, `after`); reader.py reads the arguments and lark.py makes a
model write them. `head` and `after` get the text and a place in it and answer None where more text could change the
answer, and only where a bounded length of it was looked at.

Behind a mark of calls every spelling of an object that says which function is called, with which arguments, is read.
Where there is none, a call might as well be quoted: it must be a paragraph of its own (or stand in a fence, where the
format has them), begin with its name, and have arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.engine.text.tools.scan import MAX_FRAME_CHARS, Head, Malformed, call_head, skip_blank

NAMES = ("hermes", "llama3_json", "mistral", "qwen2_5_coder")

_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}+")


class After(NamedTuple):
    """What follows a call: another one without a mark of its own (`is_call`), or text. `end` is where that begins."""

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


@dataclass(frozen=True)
class Format:
    """`closers`: the marks that open calls, each with what closes them. `fences` are those that open other things as
    well. `punctuation` are further texts that may be tokens of their own. `is_bare`: a paragraph that begins with a
    brace may be a call without a mark. `has_args`: calls may be a name and its arguments. `has_many`: an answer may
    have several calls. `id_length`: what the template accepts as the id of a call."""

    name: str
    written: Written
    closers: Mapping[str, str]
    fences: tuple[str, ...] = ()
    punctuation: tuple[str, ...] = ()
    is_bare: bool = False
    has_args: bool = False
    has_many: bool = True
    id_length: int = 24
    marks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", tuple(self.closers))

    def head(self, text: str, at: int, mark: str, is_first: bool) -> Head | None:
        """Read a call up to its arguments. `is_first`: it stands right behind the mark, "" for none. Raises
        Malformed."""
        place: int | None = at
        if is_first and mark in self.fences:
            place = _passed(text, at, "json")
        brace = place = None if place is None else _next_sign(text, at, place)
        if place is not None and is_first and text[place] == "[":
            brace = _next_sign(text, at, place + 1)
        if place is None or brace is None:
            return None
        if text[brace] != "{":
            if self.has_args and brace == place and is_first:
                return _bare_head(text, place)
            raise Malformed(place if mark else brace)  # a mark may begin here; without one, some of it must be passed
        head = call_head(text, brace)
        if head is not None and mark in ("", *self.fences) and not (head.is_plain and head.kind != "none"):
            raise Malformed(head.end)
        return None if head is None else head._replace(is_list=brace > place)

    def after(self, text: str, at: int, mark: str, in_list: bool) -> After | None:
        """Read what separates a finished call from what follows; blanks have been passed over."""
        if in_list:
            return After(at + 1) if text[at] == "]" else _next_call(text, at, ",", "{", needs_separator=True)
        end = _passed(text, at, self.closers.get(mark, ""))
        if end is None or end > at:
            return None if end is None else After(end)
        return _next_call(text, at, ";,", "{[") if self.goes_on(mark) else After(at)

    def goes_on(self, mark: str) -> bool:
        """Behind a call may stand what closes it, or another one."""
        return self.is_bare or bool(self.closers.get(mark))


class ToolSpec(NamedTuple):
    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = True  # a schema that no grammar can express is refused, not loosened
    coerce_one_of: bool = False  # but for its oneOf


class Calls(NamedTuple):
    """What an answer may call. `must`: it is a call and nothing else. `many`: one after the other."""

    form: Format
    functions: Sequence[ToolSpec]
    must: bool
    many: bool


HERMES = Format(
    "hermes",
    Written("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n<tool_call>", ""),
    {"<tool_call>": "</tool_call>"},
    punctuation=("</tool_call>",),
)
LLAMA = Format(
    "llama3_json",
    Written("", '{"name": "', '", "parameters": ', "}", "; ", ""),
    {"<|python_tag|>": ""},
    is_bare=True,
    has_many=False,  # the template refuses a history with more than one; several are read nevertheless
)
CODER = Format(
    "qwen2_5_coder",
    Written("```json\n", '{"name": "', '", "arguments": ', "}", "\n", "\n```"),
    {"<tool_call>": "</tool_call>", "<tools>": "</tools>", "```": "```"},
    fences=("```",),
    punctuation=("</tool_call>",),
    is_bare=True,
)


def mistral(has_args: bool) -> Format:
    """Both forms are read; `has_args` says that the model knows the newer one, and makes it write that."""
    objects = Written("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]")
    return Format(
        "mistral",
        Written("[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]", "") if has_args else objects,
        {"[TOOL_CALLS]": ""},
        punctuation=("[ARGS]", "[CALL_ID]"),
        has_args=True,
        id_length=9,  # its templates refuse any other
    )


def detect(source: str, has_tools: bool, has_args: bool) -> Format | None:
    """The format that a chat template writes calls in; None where it is none of ours.

    A template that knows no tools gets them as text (engine/text/tool_prompt.py), in the form of Hermes.
    """
    if not has_tools:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return mistral(has_args or "[ARGS]" in source)
    if "<function=" in source or "<arg_key>" in source:  # as <tool_call> in Qwen 3 Coder and GLM, but not JSON
        return None
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ("<|eot_id|>" in source and '"parameters"' in source):
        return LLAMA
    if "```json" in source and '"name"' in source and '"arguments"' in source and "｜" not in source:
        return CODER  # not Qwen 2.5 Coder itself: its template is that of Qwen 2.5, and says what it does not write
    return None


def named(name: str, source: str, has_args: bool) -> Format:
    """The format of this name, one of NAMES."""
    if name == "mistral":
        return mistral(has_args or "[ARGS]" in source)
    return {form.name: form for form in (HERMES, LLAMA, CODER)}[name]


def _passed(text: str, at: int, mark: str) -> int | None:
    """The place behind `mark` if it stands here, else this place."""
    if text.startswith(mark, at):
        return at + len(mark)
    return None if mark.startswith(text[at : at + len(mark)]) else at


def _next_sign(text: str, start: int, at: int) -> int | None:
    """The place of what follows the blanks, within the length that a frame has from `start` on."""
    place = skip_blank(text, at)
    if place - start >= MAX_FRAME_CHARS:
        raise Malformed(place)
    return None if place == len(text) else place


def _next_call(text: str, at: int, separators: str, opening: str, needs_separator: bool = False) -> After | None:
    is_separated = text[at] in separators
    place = skip_blank(text, at + is_separated)
    if place - at > MAX_FRAME_CHARS or needs_separator > is_separated:
        return After(at)
    if place == len(text):
        return None
    return After(place, True) if text[place] in opening else After(at)


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
