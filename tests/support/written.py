"""How models write calls besides the way of their templates, with what is read of it: (text, content, calls).

The spellings are those that the parsers of other servers are tested with; the texts are our own.
"""

from collections.abc import Callable

Calls = list[tuple[str, str]]
Sample = tuple[str, str, Calls]

ULM = '{"city": "Ulm"}'
WEATHER, CLOCK = ("weather", ULM), ("clock", "{}")
W = f'{{"name": "weather", "arguments": {ULM}}}'
P = f'{{"name": "weather", "parameters": {ULM}}}'
C = '{"name": "clock", "arguments": {}}'
PRETTY_ULM = '{\n    "city": "Ulm"\n  }'
PRETTY = f'{{\n  "name": "weather",\n  "arguments": {PRETTY_ULM}\n}}'
COMPACT = '{"name":"weather","arguments":{"city":"Ulm"}}'


def _objects(wrap: Callable[[str], str]) -> list[Sample]:
    """Ways to write one call, in what a format puts around one."""
    return [
        (wrap(text), "", calls)
        for text, calls in (
            (W, [WEATHER]),
            (P, [WEATHER]),
            (COMPACT, [("weather", '{"city":"Ulm"}')]),
            (PRETTY, [("weather", PRETTY_ULM)]),
            (f'{{ "name" : "weather" , "arguments" : {ULM} }}', [WEATHER]),
            (f'{{"name": "weather",\n"arguments":{ULM}}}', [WEATHER]),
            (f'{{"type": "function", "name": "weather", "parameters": {ULM}}}', [WEATHER]),
            (f'{{"name": "weather", "arguments": {ULM}, "type": "function"}}', [WEATHER]),
            ('{"name": "clock", "arguments": { }}', [("clock", "{ }")]),
            ('{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}',
             [("weather", '{"city": "Zürich", "days": 3}')]),
            ('{"name": "weather", "arguments": {"city": "a } ] \\" { \\\\"}}',
             [("weather", '{"city": "a } ] \\" { \\\\"}')]),
        )
    ]  # fmt: skip


def _marked(wrap: Callable[[str], str]) -> list[Sample]:
    """More of them, which are calls for certain only behind a mark."""
    return [
        (wrap(text), "", calls)
        for text, calls in (
            (f'{{"arguments": {ULM}, "name": "weather"}}', [WEATHER]),
            (f'{{\n"parameters": {ULM},\n"name": "weather"\n}}', [WEATHER]),
            ('{"name": "clock"}', [CLOCK]),
            ('{ "name": "clock" }', [CLOCK]),
            (f'{{"id": "a1", "name": "weather", "arguments": {ULM}}}', [WEATHER]),
        )
    ]


def _quoted(wrap: Callable[[str], str]) -> list[Sample]:
    """Arguments as a string that holds them. A grammar has an object instead, since it can hold that to its schema."""
    return [
        (wrap(f'{{"name": "weather", "{key}": "{{\\"city\\":{blank}\\"Ulm\\"}}"}}'), "", [("weather", arguments)])
        for key, blank, arguments in (("arguments", " ", ULM), ("parameters", "", '{"city":"Ulm"}'))
    ]


def _tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


WRITTEN: dict[str, list[Sample]] = {
    "hermes": [
        *_objects(_tag),
        *_marked(_tag),
        (f"<tool_call>{W}</tool_call>", "", [WEATHER]),
        (f"<tool_call> {W} </tool_call>", "", [WEATHER]),
        (f"<tool_call>\n\n{W}\n\n</tool_call>\n", "", [WEATHER]),
        (f"<tool_call>\r\n{W}\r\n</tool_call>", "", [WEATHER]),
        (_tag(f"[{W}]"), "", [WEATHER]),
        (_tag(f"[{W}, {C}]"), "", [WEATHER, CLOCK]),
        (_tag(f"[\n  {W},\n  {C}\n]"), "", [WEATHER, CLOCK]),
        (_tag(f"{W}, {C}"), "", [WEATHER, CLOCK]),
        (_tag(f"{W},\n{C},\n{W}"), "", [WEATHER, CLOCK, WEATHER]),
        (_tag(f"{W}\n{C}"), "", [WEATHER, CLOCK]),
        (_tag(f"{W}; {C}"), "", [WEATHER, CLOCK]),
        (_tag(W) + _tag(C), "", [WEATHER, CLOCK]),
        (_tag(W) + "\n\n" + _tag(C), "", [WEATHER, CLOCK]),
        (f"I will look.\n\n{_tag(W)}\n\nOne moment.", "I will look.\n\nOne moment.", [WEATHER]),
        (f"Look:{_tag(W)}", "Look:", [WEATHER]),
    ],
    "llama3_json": [
        *_objects(str),
        *_objects("<|python_tag|>{}".format),
        *_marked("<|python_tag|>{}".format),
        (f"{P};{C}", "", [WEATHER, CLOCK]),
        (f"{P} ; {C}", "", [WEATHER, CLOCK]),
        (f"{P};\n{C}", "", [WEATHER, CLOCK]),
        (f"{P}\n{C}", "", [WEATHER, CLOCK]),
        (f"{P}\n\n{C}", "", [WEATHER, CLOCK]),
        (f"{P}, {C}", "", [WEATHER, CLOCK]),
        (f"{P}; {C}; {P}", "", [WEATHER, CLOCK, WEATHER]),
        (f"[{P}, {C}]", "", [WEATHER, CLOCK]),
        (f"<|python_tag|>[{P}]", "", [WEATHER]),
        (f"<|python_tag|> {P}\n{C}", "", [WEATHER, CLOCK]),
        (f"I will look.\n\n{P}", "I will look.", [WEATHER]),
        (f"I will look.\n\n{P}\n\nOne moment.", "I will look.\n\nOne moment.", [WEATHER]),
        (f"{P} I used {{weather}} for this.", " I used {weather} for this.", [WEATHER]),
        (f"{P} I passed {ULM} on.", f" I passed {ULM} on.", [WEATHER]),
    ],
    "mistral": [
        *_objects("[TOOL_CALLS][{}]".format),
        *_objects("[TOOL_CALLS] {}".format),
        *_marked("[TOOL_CALLS] [{}]".format),
        (f"[TOOL_CALLS]\n[{W}]", "", [WEATHER]),
        (f"[TOOL_CALLS] [ {W} ]", "", [WEATHER]),
        (f"[TOOL_CALLS][{W},{C}]", "", [WEATHER, CLOCK]),
        (f"[TOOL_CALLS] [{W},\n {C}]\n", "", [WEATHER, CLOCK]),
        (f"[TOOL_CALLS][{W}][TOOL_CALLS][{C}]", "", [WEATHER, CLOCK]),
        ('[TOOL_CALLS][{"arguments": {"city": "\\"name\\": \\"clock\\""}, "name": "weather"}]', "",
         [("weather", '{"city": "\\"name\\": \\"clock\\""}')]),
        (f"Hello[TOOL_CALLS] [{W}]\nthat is all", "Hello\nthat is all", [WEATHER]),
        (f"[TOOL_CALLS]weather{ULM}", "", [WEATHER]),
        (f"[TOOL_CALLS]weather[ARGS]{ULM}", "", [WEATHER]),
        (f"[TOOL_CALLS] weather[ARGS] {ULM}", "", [WEATHER]),
        (f"[TOOL_CALLS]weather\n{ULM}\n[TOOL_CALLS]clock{{}}", "", [WEATHER, CLOCK]),
        (f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ULM}[TOOL_CALLS]clock[ARGS]{{}}", "", [WEATHER, CLOCK]),
    ],
    "qwen2_5_coder": [
        *_objects(str),
        *_objects("```json\n{}\n```".format),
        *_objects(_tag),
        *_marked(_tag),
        (f"```json\n{W}\n```", "", [WEATHER]),
        (f"```\n{W}\n```", "", [WEATHER]),
        (f"```json\n{W}\n{C}\n```", "", [WEATHER, CLOCK]),
        (f"```json\n[\n{W},\n{C}\n]\n```", "", [WEATHER, CLOCK]),
        (f"```json\n{W}\n```\n\n```json\n{C}\n```", "", [WEATHER, CLOCK]),
        (f"I will look:\n```json\n{W}\n```\nOne moment.", "I will look:\nOne moment.", [WEATHER]),
        (f"I will look:\n\n{W}", "I will look:", [WEATHER]),
        (f"{W}\n{C}", "", [WEATHER, CLOCK]),
        (f"<tools>\n{W}\n</tools>", "", [WEATHER]),
        (f"<tools>[{W}, {C}]</tools>", "", [WEATHER, CLOCK]),
        (f"<tools>{W}</tools><tools>{C}</tools>", "", [WEATHER, CLOCK]),
        (f"```python\nprint(1)\n```\nand\n```json\n{W}\n```", "```python\nprint(1)\n```\nand", [WEATHER]),
    ],
}  # fmt: skip
WRITTEN["mistral with args"] = WRITTEN["mistral"]
QUOTED: dict[str, list[Sample]] = {
    "hermes": _quoted(_tag),
    "llama3_json": _quoted(str),
    "mistral": _quoted("[TOOL_CALLS] [{}]".format),
    "qwen2_5_coder": _quoted("```json\n{}\n```".format),
}
# What speaks of calls, or is broken, and calls nothing: content to the letter.
_NO_CALLS = [
    W,
    f"The call would be {W}.",
    f"Like this:\n{W}",
    f"- `{W}`",
    f'{{\n  "calls": [\n    {W}\n  ]\n}}',
    ULM,
    "[1, 2]",
    '[\n  "name"]',
    '{"name": "Bob", "arguments": {}}',
    '{"name": "Bob"}',
    '{"type": "object", "properties": {"name": {}}}',
]
_IN_A_MARK = [
    '{"name": "unknown", "arguments": {}}',
    '{"name": "unknown"}',
    '{"arguments": {}}',
    "{}",
    "[]",
    '{"id": "a1"}',
    '{"name": "clock", "arguments": "hello"}',
    '{"name": "clock", "arguments": "{}',
    '{"name": "clock", "arguments": "[]"}',
    '{"name": "clock", "arguments": "{\\"a\\": }"}',
    '{"name": "clock", "arguments": null}',
    '{"name": "clock", "arguments": 5}',
    '{"name": "clock", "arguments": {}, "arguments": {"a": 1}}',
    '{"name": "clock", "arguments": {}, "parameters": {}}',
    '{"name": "clock", "arguments": {}, "name": "weather"}',
    '{"name": "clock", "name": "weather", "arguments": {}}',
    '{"arguments": {}, "name": "unknown"}',
    '{"type": "tool", "name": "clock", "arguments": {}}',
    '{"name": "clock", "arguments": {}, "more": "x"}',
    '{"name": clock, "arguments": {}}',
    '["clock"]',
    "clock()",
]
NO_CALLS = {
    "hermes": [*_NO_CALLS, *map("<tool_call>{}</tool_call>".format, _IN_A_MARK)],
    "llama3_json": [
        *_NO_CALLS[1:],
        *map("<|python_tag|>{}".format, _IN_A_MARK),
        *_IN_A_MARK,
        *(f"It is {P}", f"```json\n{P}\n```", f"Like this:\n{P}", f"- {P}"),
        '{"name": "clock"}',
        f'{{"arguments": {ULM}, "name": "weather"}}',
        f'{{"id": "a1", "name": "weather", "arguments": {ULM}}}',
    ],
    "mistral": [*_NO_CALLS, *map("[TOOL_CALLS] [{}]".format, _IN_A_MARK), f"[TOOL_CALLS] junk [{W}]"],
    "qwen2_5_coder": [
        *_NO_CALLS[1:],
        *map("<tool_call>{}</tool_call>".format, _IN_A_MARK),
        *map("```json\n{}\n```".format, [*_IN_A_MARK, '{"name": "clock"}', f'{{"arguments": {ULM}, "name": "weather"}}']),
        f"```python\ncall = {W}\n```",
        f"```python\n{W}\n```",
    ],
}  # fmt: skip
