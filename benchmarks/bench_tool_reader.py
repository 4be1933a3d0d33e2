"""The readers of tool calls on nasty and on ordinary texts of a megabyte: milliseconds of one core for each.

    python benchmarks/bench_tool_reader.py [--chars 1000000]

No ratio: there is nothing to compare with. What matters is that the worst of them stays near the others.
"""

import time

from pairs import arguments, record, table

from penstock.engine.text.tools.formats import CODER, HERMES, LLAMA, Format, mistral
from penstock.engine.text.tools.reader import CallReader

HEAD = '<tool_call>{"name": "f", "arguments": '
UNITS = ("<tool_call>", "<", "[", "[]", "[1],", "{}", '"', '""', '"",', "\\", " ", "word ", "[TOOL_CALLS]", '{"a":1},')
BEFORE = ("", HEAD + '{"a": [', HEAD + '{"a": "', '[TOOL_CALLS]f[ARGS]{"a": [', '{"name": "f", "parameters": {"a": [')


def cpu_ms(form: Format, text: str, piece_chars: int) -> float:
    reader = CallReader(form, {"f"})
    started_s = time.process_time()
    for at in range(0, len(text), piece_chars):
        reader.feed(text[at : at + piece_chars])
    reader.finish()
    return (time.process_time() - started_s) * 1e3


def main() -> None:
    size = arguments(__doc__, chars=1_000_000).chars
    rows = []
    for form in (HERMES, LLAMA, mistral(has_args=True), CODER):
        for before in BEFORE:
            for unit in UNITS:
                text = before + unit * (size // len(unit))
                whole_ms = min(cpu_ms(form, text, len(text)) for _ in range(2))
                # A twentieth of the text as tokens would bring it: most of this is the calls of `feed` themselves.
                pieces_us = cpu_ms(form, text[: size // 20], 4) * 1e3 / (size // 80)
                name = f"{form.name} {before!r} + {unit!r} × n"
                rows.append({"text": name, "whole, ms": whole_ms, "a piece of 4, µs": pieces_us})
    rows.sort(key=lambda row: row["whole, ms"], reverse=True)
    table(rows[:8])
    worst = {name: round(max(row[name] for row in rows), 1) for name in ("whole, ms", "a piece of 4, µs")}
    record("tool_reader", {"chars": size, "worst": worst})


if __name__ == "__main__":
    main()
