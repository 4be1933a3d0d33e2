"""The formats in which models write tool calls, and the detection of a model's format from its chat template.

    ObjectCalls   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>       hermes, llama3_json, mistral …
    NamedCalls    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>           deepseek_v31, mistral …
      with tags   <function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>        qwen3_coder, glm45, minimax_m2 …
      literals    [f(a=1, b='x')]     call:f{a:1,b:<|"|>x<|"|>}                     lfm2, olmo3, gemma4 …

To add a format, add an entry to formats.json: the kind, and the fields of its class (call_kinds.py).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.text.tools import harmony
from penstock.engine.text.tools.call_kinds import NamedCalls, ObjectCalls, ToolFormat

_KINDS: dict[str, type[ToolFormat]] = {"objects": ObjectCalls, "named": NamedCalls}
_ROWS = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=list[dict[str, Any]])
# The first format whose texts are in a template is the model's format, so special formats precede general ones.
FORMATS = (harmony.FORM, *(msgspec.convert(row, _KINDS[row["kind"]]) for row in _ROWS))
HERMES, CODER = (next(form for form in FORMATS if form.name == name) for name in ("hermes", "qwen2_5_coder"))
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
