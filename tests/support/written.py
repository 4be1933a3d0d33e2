"""Answers with tool calls as models write them, by format, with what is read of each: [text, content, calls].

`WRITTEN` are calls written in other ways than the model's template writes them; the spellings are those that the parsers of other
servers are tested with, the texts are our own. In `QUOTED` the arguments are a string that holds them: a grammar has an object
instead, since it can hold that to its schema. `NO_CALLS` speak of calls or are broken, so they are content. `GOOD` mixes calls and
text, and `BROKEN` are calls in the format of Hermes that break off or are wrong.
"""

import json
from pathlib import Path
from typing import Any

Calls = list[tuple[str, str]]
Sample = tuple[str, str, Calls]

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def _samples(section: str) -> dict[str, list[Sample]]:
    return {
        name: [(text, content, [tuple(call) for call in calls]) for text, content, calls in samples]
        for name, samples in _DATA[section].items()
    }


WRITTEN, QUOTED, GOOD = _samples("written"), _samples("quoted"), _samples("good")
WRITTEN["mistral with args"], GOOD["mistral with args"] = WRITTEN["mistral"], GOOD["mistral"]
NO_CALLS: dict[str, list[str]] = _DATA["no_calls"]
BROKEN: list[str] = _DATA["bad"]
C, W, P = _DATA["objects"]  # one call of the clock, and one of the weather in two spellings
# Pieces that a random answer tries to write where the grammar does not expect them.
MISLEADING = [
    *("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```json\n", "```"),
    *('{"name": "', "weather", "clock", "Bob", '"', '{"type": "function", "name": "', '{"', 'name": "', "name", "type"),
    *(", ", ",", "; ", ";", "\n", "\n\n", " ", "[", "]", "{", "}", "}}", ": ", "arguments", "parameters", "id", "a1"),
    *('", "arguments": {', '", "parameters": {', '"city": "Ulm"', '"days": 3', '{"city": "Ulm"}', "{}", W, P, C, "and"),
]  # fmt: skip
