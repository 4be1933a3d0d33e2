"""The formats in which models write tool calls, and the detection of a model's format from its chat template.

    objects        <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>       hermes, llama3_json, mistral …
    named JSON     <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>           deepseek_v31, mistral …
    tagged text    <function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>        qwen3_coder, glm45, minimax_m2 …
    literals       [f(a=1, b='x')]     call:f{a:1,b:<|"|>x<|"|>}                     lfm2, olmo3, gemma4 …

A format is just an entry of FORMATS: reader.py and arguments.py parse it, engine/grammar constrains a model to it.

After a call mark, the parser accepts any spelling of an object that names the function and its arguments. Without a
mark, the text might only quote a call. It then counts as a call only if it is a separate paragraph (or is in a code
fence, for formats with fences), begins with its name, and has arguments.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

# Matches texts that may be special tokens of a model.
_TOKEN = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]+\]")


def tokens_in(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(token for text in texts for token in _TOKEN.findall(text)))


class Written(NamedTuple):
    """The spelling of calls that a grammar enforces: `start`, one or more calls separated by `join`, `end`."""

    start: str
    before_name: str
    before_arguments: str
    after_arguments: str
    join: str
    end: str


class Parameters(NamedTuple):
    """The spelling of arguments that are not JSON: one after the other, separated by `join`.

    Without `quote`, a value is the text up to `after_value`, and the schema determines its type. With the quote '"',
    values are Python literals. With any other quote, values are JSON, except that strings are verbatim between two
    quotes and names are unquoted."""

    before_key: str
    before_value: str
    after_value: str = ""
    join: str = ""
    quote: str = ""

    @property
    def trims(self) -> bool:
        """True if a line break at the start or end of a value is not part of it."""
        return self.before_value.endswith("\n")


@dataclass(frozen=True)
class ToolFormat:
    """A tool call format. `found_by`: groups of texts; a chat template with all texts of a group has this format.
    `closers`: the marks that open calls, each with its closing text. `fences`: marks that may also open other content.
    `extra`: further texts that may be special tokens. `is_bare`: a paragraph that begins with a bracket may be a call
    without a mark (objects only). `is_framed`: a call is a name and its arguments. `has_args`: a call may also be
    `f[ARGS]{…}`. `has_many`: an answer may have several calls. `id_length`: length of a call's id in the template."""

    name: str
    found_by: tuple[tuple[str, ...], ...]
    written: Written
    closers: Mapping[str, str]
    parameters: Parameters | None = None
    fences: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    is_bare: bool = False
    has_args: bool = False
    has_many: bool = True
    id_length: int = 24

    @cached_property
    def is_framed(self) -> bool:
        return not self.written.before_name.startswith("{") and not self.has_args

    @cached_property
    def marks(self) -> tuple[str, ...]:
        return tuple(self.closers)

    @cached_property
    def triggers(self) -> tuple[str, ...]:
        """The marks after which a grammar enforces optional calls: those in its spelling and those without a closer."""
        written = self.written.start + self.written.before_name
        return tuple(
            mark for mark in self.marks if mark not in self.fences and (mark in written or not self.closers[mark])
        )

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """All texts of the format that may be special tokens."""
        return tokens_in(
            *self.closers, *self.closers.values(), *self.written, *map(str, self.parameters or ()), *self.extra
        )

    def closing(self, mark: str) -> list[str]:
        """Return the texts that close calls opened by this mark; without a mark, those of the enforced spelling."""
        return re.findall(r"\]|[^\]]+", self.closers.get(mark, self.written.end).strip())

    def opening(self, mark: str) -> str:
        """Return the text between a mark and the name of the first call."""
        whole = self.written.start + self.written.before_name
        _, found, rest = whole.partition(mark if mark in whole else self.marks[0])
        return rest if found else whole


class ToolSpec(NamedTuple):
    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool = True  # a schema that a grammar cannot express exactly is refused, not loosened
    coerce_one_of: bool = False  # treat oneOf as anyOf even if `is_strict`


class Calls(NamedTuple):
    """The calls that an answer may have. `must`: the answer consists of calls only. `many`: several are allowed."""

    form: ToolFormat
    functions: Sequence[ToolSpec]
    must: bool
    many: bool


def _format(
    name: str,
    start: str,
    end: str,
    call: tuple[str, str, str],
    parameters: Parameters | None = None,
    *,
    join: str | None = None,
    found_by: tuple[tuple[str, ...], ...] = (),
    closers: Mapping[str, str] | None = None,
    **more: Any,
) -> ToolFormat:
    """Build a format. `call`: the texts before the name, before the arguments and after them. The default `join` is a
    comma if `start` opens a list; otherwise each call gets its own `start` and `end`. The default mark is `start`
    without whitespace and a bracket at its end."""
    mark = start.strip().rstrip("[")
    if join is None:
        join = ", " if start.endswith("[") else f"{end}\n{start}"
    written = Written(start, *call, join, end)
    return ToolFormat(name, found_by or ((mark,),), written, closers or {mark: end.strip()}, parameters, **more)


_OBJECT = ('{"name": "', '", "arguments": ', "}")
_FUNCTION = ("<function=", ">\n", "</function>")
_PYTHON = ("", "(", ")"), Parameters("", "=", join=", ", quote='"')
HERMES = _format("hermes", "<tool_call>\n", "\n</tool_call>", _OBJECT)
LLAMA = _format(
    "llama3_json",
    *("", "", ('{"name": "', '", "parameters": ', "}")),
    join="; ",
    found_by=(("<|python_tag|>",), ("<|eot_id|>", '"parameters"'), ("<|eot|>", '"parameters"')),
    closers={"<|python_tag|>": ""},
    is_bare=True,
    has_many=False,  # the template refuses a history with several calls in one answer; the parser still accepts them
)
CODER = _format(
    "qwen2_5_coder",
    *("```json\n", "\n```", _OBJECT),
    join="\n",
    # Does not match Qwen 2.5 Coder itself: it ships the template of Qwen 2.5, whose format it does not write.
    found_by=(("```json", '"name"', '"arguments"'),),
    closers={"<tool_call>": "</tool_call>", "<tools>": "</tools>", "```": "```"},
    fences=("```",),
    is_bare=True,
)
_MISTRAL = _format(
    "mistral",
    *("[TOOL_CALLS][", "]", _OBJECT),
    closers={"[TOOL_CALLS]": ""},
    extra=("[ARGS]", "[CALL_ID]"),
    has_args=True,
    id_length=9,  # its templates refuse any other
)


def _deepseek(name: str, before: str, between: str, behind: str, **more: Any) -> ToolFormat:
    call = (f"<｜tool▁call▁begin｜>{before}", between, f"{behind}<｜tool▁call▁end｜>")
    return _format(name, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", call, **more)


# The first format whose texts are in a template is the model's format, so special formats precede general ones.
FORMATS = (
    replace(
        _MISTRAL,
        found_by=(("[TOOL_CALLS]", "[ARGS]"),),
        written=Written("[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]", ""),
    ),
    _MISTRAL,
    _format(
        "seed_oss",
        *("<seed:tool_call>\n", "\n</seed:tool_call>", _FUNCTION),
        Parameters("<parameter=", ">", "</parameter>\n"),
    ),
    _format(
        "qwen3_coder",
        *("<tool_call>\n", "\n</tool_call>", _FUNCTION),
        Parameters("<parameter=", ">\n", "\n</parameter>\n"),
        found_by=(("<tool_call>", "<function="),),
        closers={"<tool_call>": "</tool_call>", "<function=": "</tool_call>"},  # models often omit the first mark
    ),
    _format(
        "glm47",
        *("<tool_call>", "</tool_call>", ("", "", "")),
        Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        join="</tool_call><tool_call>",
        found_by=(("</arg_key><arg_value>",),),
    ),
    _format(
        "glm45",
        *("<tool_call>", "</tool_call>", ("", "\n", "")),
        Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        found_by=(("<arg_key>",),),
    ),
    _deepseek(
        "deepseek_v3",
        *("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
        join="\n",
        found_by=(("<｜tool▁sep｜>", "```json"),),
    ),
    _deepseek("deepseek_v31", "", "<｜tool▁sep｜>", "", join="", found_by=(("<｜tool▁sep｜>",),)),
    _format(
        "minimax_m2",
        *("<minimax:tool_call>\n", "\n</minimax:tool_call>", ('<invoke name="', '">\n', "</invoke>")),
        Parameters('<parameter name="', '">', "</parameter>\n"),
        join="\n",
    ),
    _format(
        "gemma4",
        *("<|tool_call>", "<tool_call|>", ("call:", "{", "}")),
        Parameters("", ":", join=",", quote='<|"|>'),
        join="<tool_call|><|tool_call>",
        found_by=(("<|tool_call>", '<|"|>'),),
    ),
    _format(
        "lfm2",
        *("<|tool_call_start|>[", "]<|tool_call_end|>", *_PYTHON),
        found_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    _format("olmo3", "<function_calls>\n", "\n</function_calls>", *_PYTHON, join="\n"),
    _format(
        "phi4_mini_json",
        *("<|tool_call|>[", "]<|/tool_call|>", _OBJECT),
        found_by=(("<|tool_call|>", "<|/tool_call|>"),),
        closers={"<|tool_call|>": "<|/tool_call|>", "functools[": "]"},
    ),
    _format("phi4_mini_json", "functools[", "]", _OBJECT, found_by=(("functools[",),), closers={"functools[": "]"}),
    _format("granite", "<|tool_call|>[", "]", _OBJECT, closers={"<|tool_call|>": "", "<tool_call>": ""}),
    _format("hunyuan_a13b", "<tool_calls>[", "]</tool_calls>", _OBJECT, closers={"<tool_calls>": "</tool_calls>"}),
    HERMES,
    LLAMA,
    CODER,
)
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))
# vLLM's names for some formats.
ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "granite4": "hermes",
    "openai": "harmony",  # has a separate parser (harmony_reader.py)
}


def detect(source: str, has_tools: bool, has_args: bool) -> ToolFormat | None:
    """Return the format in which a chat template writes calls; None if it is not known.

    For a template without tool support, template_messages.py renders tools as text in the Hermes format.
    """
    return _first(FORMATS, source + "[ARGS]" * has_args) if has_tools else HERMES


def named(name: str, source: str, has_args: bool) -> ToolFormat:
    """Return the format with this name, one of NAMES; if several share it, the one that matches the template."""
    forms = [form for form in FORMATS if form.name == name]
    return _first(forms, source + "[TOOL_CALLS][ARGS]" * has_args) or forms[-1]


def _first(forms: Iterable[ToolFormat], source: str) -> ToolFormat | None:
    return next((form for form in forms if any(all(map(source.__contains__, texts)) for texts in form.found_by)), None)
