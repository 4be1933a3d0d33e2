"""Chat templates in the manner of the well-known families, and conversations that exercise their branches."""

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "templates"

CHATML = (_FOLDER / "chatml.jinja").read_text()

LLAMA3 = (_FOLDER / "llama3.jinja").read_text()

HARMONY = (_FOLDER / "harmony.jinja").read_text()

QWEN3 = (_FOLDER / "qwen3.jinja").read_text()

GEMMA = (_FOLDER / "gemma.jinja").read_text()

MISTRAL = (_FOLDER / "mistral.jinja").read_text()

MISTRAL_CALLS = (_FOLDER / "mistral_calls.jinja").read_text()

GENERATION = (_FOLDER / "generation.jinja").read_text()

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "generation": GENERATION,
}

USER = {"role": "user", "content": " Hello, “wörld” <b>&amp;</b>\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi there "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "content": '{"°C": 7}', "tool_call_id": "call12345"}
REASONED = {"role": "assistant", "content": "7.", "reasoning_content": "easy"}
SYSTEM = {"role": "system", "content": "Be brief.  "}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "many": [SYSTEM, USER, ANSWER, USER, REASONED, USER],
    "tools": [USER, CALL, RESULT, REASONED, USER],
    "two answers of tools": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER],
}
