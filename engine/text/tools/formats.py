"""The ways in which models write calls, and which of them a model was trained on.

    hermes         <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>     Qwen 2.5 and 3, Hermes, ChatML models
    llama3_json    {"name": "f", "parameters": {…}}, or behind <|python_tag|>      Llama 3.1 to 3.3
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                Mistral until 2024
                   [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…                             Mistral since
    qwen2_5_coder  the same object between ```json and ```, alone, in <tools>      Qwen 2.5 Coder
                   or in <tool_call>

reader.py reads all of them, and engine/grammar/tool_calls.py makes a model write them.

Behind a mark of calls every spelling of an object that says which function is called, with which arguments, is read.
Where there is none, a call might as well be quoted: it must be a paragraph of its own (or stand in a fence, where the
format has them), begin with its name, and have arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NAMES = ("hermes", "llama3_json", "mistral", "qwen2_5_coder")


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

    A template that knows no tools gets them as text (engine/text/conversation.py), in the form of Hermes.
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
