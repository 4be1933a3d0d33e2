"""The formats in which models write tool calls, and the detection of a model's format from its chat template.

    ObjectCalls   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>       hermes, llama3_json, mistral …
    NamedCalls    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>           deepseek_v31, mistral …
      with tags   <function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>        qwen3_coder, glm45, minimax_m2 …
      literals    [f(a=1, b='x')]     call:f{a:1,b:<|"|>x<|"|>}                     lfm2, olmo3, gemma4 …

To add a format, add an object of one of these classes (call_kinds.py) to FORMATS.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.engine.text.tools import harmony
from penstock.engine.text.tools.arguments import Parameters
from penstock.engine.text.tools.call_kinds import NamedCalls, ObjectCalls, ToolFormat

_OBJECT = ('{"name": "', '", "arguments": ', "}")
_FUNCTION = ("<function=", ">\n", "</function>")
_PYTHON = "", "(", ")", Parameters("", "=", join=", ", quote='"')
HERMES = ObjectCalls("hermes", "<tool_call>\n", "\n</tool_call>", *_OBJECT)
LLAMA = ObjectCalls(
    "llama3_json",
    *("", "", '{"name": "', '", "parameters": ', "}"),
    join="; ",
    found_by=(("<|python_tag|>",), ("<|eot_id|>", '"parameters"'), ("<|eot|>", '"parameters"')),
    closers={"<|python_tag|>": ""},
    is_bare=True,
    has_many=False,  # the template refuses a history with several calls in one answer; the parser still accepts them
)
CODER = ObjectCalls(
    "qwen2_5_coder",
    *("```json\n", "\n```", *_OBJECT),
    join="\n",
    # Does not match Qwen 2.5 Coder itself: it ships the template of Qwen 2.5, whose format it does not write.
    found_by=(("```json", '"name"', '"arguments"'),),
    closers={"<tool_call>": "</tool_call>", "<tools>": "</tools>", "```": "```"},
    fences=("```",),
    is_bare=True,
)
_MISTRAL = ObjectCalls(
    "mistral",
    *("[TOOL_CALLS][", "]", *_OBJECT),
    closers={"[TOOL_CALLS]": ""},
    extra=("[ARGS]", "[CALL_ID]"),
    has_args=True,
    id_length=9,  # its templates refuse any other
)


def _deepseek(name: str, before: str, between: str, behind: str, **more: Any) -> ToolFormat:
    call = (f"<｜tool▁call▁begin｜>{before}", between, f"{behind}<｜tool▁call▁end｜>")
    return NamedCalls(name, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", *call, **more)


# The first format whose texts are in a template is the model's format, so special formats precede general ones.
FORMATS: tuple[ToolFormat, ...] = (
    harmony.FORM,
    replace(
        _MISTRAL,
        start="[TOOL_CALLS]",
        before_name="",
        before_arguments="[ARGS]",
        after_arguments="",
        join="[TOOL_CALLS]",
        end="",
        found_by=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    _MISTRAL,
    NamedCalls(
        "seed_oss",
        *("<seed:tool_call>\n", "\n</seed:tool_call>", *_FUNCTION),
        Parameters("<parameter=", ">", "</parameter>\n"),
    ),
    NamedCalls(
        "qwen3_coder",
        *("<tool_call>\n", "\n</tool_call>", *_FUNCTION),
        Parameters("<parameter=", ">\n", "\n</parameter>\n"),
        found_by=(("<tool_call>", "<function="),),
        closers={"<tool_call>": "</tool_call>", "<function=": "</tool_call>"},  # models often omit the first mark
    ),
    NamedCalls(
        "glm47",
        *("<tool_call>", "</tool_call>", "", "", ""),
        Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        join="</tool_call><tool_call>",
        found_by=(("</arg_key><arg_value>",),),
    ),
    NamedCalls(
        "glm45",
        *("<tool_call>", "</tool_call>", "", "\n", ""),
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
    NamedCalls(
        "minimax_m2",
        *("<minimax:tool_call>\n", "\n</minimax:tool_call>", '<invoke name="', '">\n', "</invoke>"),
        Parameters('<parameter name="', '">', "</parameter>\n"),
        join="\n",
    ),
    NamedCalls(
        "gemma4",
        *("<|tool_call>", "<tool_call|>", "call:", "{", "}"),
        Parameters("", ":", join=",", quote='<|"|>'),
        join="<tool_call|><|tool_call>",
        found_by=(("<|tool_call>", '<|"|>'),),
    ),
    NamedCalls(
        "lfm2",
        *("<|tool_call_start|>[", "]<|tool_call_end|>", *_PYTHON),
        found_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    NamedCalls("olmo3", "<function_calls>\n", "\n</function_calls>", *_PYTHON, join="\n"),
    ObjectCalls(
        "phi4_mini_json",
        *("<|tool_call|>[", "]<|/tool_call|>", *_OBJECT),
        found_by=(("<|tool_call|>", "<|/tool_call|>"),),
        closers={"<|tool_call|>": "<|/tool_call|>", "functools[": "]"},
    ),
    ObjectCalls(
        "phi4_mini_json", "functools[", "]", *_OBJECT, found_by=(("functools[",),), closers={"functools[": "]"}
    ),
    ObjectCalls("granite", "<|tool_call|>[", "]", *_OBJECT, closers={"<|tool_call|>": "", "<tool_call>": ""}),
    ObjectCalls("hunyuan_a13b", "<tool_calls>[", "]</tool_calls>", *_OBJECT, closers={"<tool_calls>": "</tool_calls>"}),
    HERMES,
    LLAMA,
    CODER,
)
NAMES = tuple(dict.fromkeys(form.name for form in FORMATS))
# vLLM's names for some formats.
ALIASES = {"qwen3_xml": "qwen3_coder", "granite4": "hermes", "openai": harmony.NAME}


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
    """Return the first format that has a group of texts which are all in the source of a chat template."""
    return next((form for form in forms if any(all(map(source.__contains__, texts)) for texts in form.found_by)), None)
