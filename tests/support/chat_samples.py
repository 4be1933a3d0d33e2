"""Chat templates in the manner of the well-known families, and conversations that exercise their branches."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "templates"
_NAMES = ("chatml", "llama3", "qwen3", "gemma", "mistral", "generation", "harmony", "mistral_calls")
_ROLES = ("one_system", "developer_first")  # templates that take a system message in their own way
_ALL = {name: (_FOLDER / f"{name}.jinja").read_text() for name in (*_NAMES, *_ROLES)}
CHATML, LLAMA3, QWEN3, GEMMA, MISTRAL, GENERATION, HARMONY, MISTRAL_CALLS, ONE_SYSTEM, DEVELOPER_FIRST = _ALL.values()
LINES, VARIABLES = ((_FOLDER / f"{name}.jinja").read_text() for name in ("lines", "variables"))  # of no model
TEMPLATES = {name: _ALL[name] for name in _NAMES[:6]}

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
_MESSAGES: dict[str, dict[str, Any]] = _DATA["messages"]
USER, ANSWER, CALL, RESULT, REASONED, SYSTEM = _MESSAGES.values()
TOOLS: list[dict[str, Any]] = _DATA["tools"]
CONVERSATIONS = {title: [_MESSAGES[name] for name in names] for title, names in _DATA["conversations"].items()}
