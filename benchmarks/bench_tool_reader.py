"""The readers of tool calls on nasty and on ordinary texts of a megabyte: milliseconds of one core for each.

    python benchmarks/bench_tool_reader.py [--output benchmarks/results/tool_reader.jsonl]

No ratio: there is nothing to compare with. What matters is that the worst of them stays near the others.
"""

import argparse
import json
import time
from pathlib import Path

from penstock.engine.text.tools.formats import CODER, HERMES, LLAMA, Format, mistral
from penstock.engine.text.tools.reader import CallReader

SIZE_CHARS = 1_000_000
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    found = []
    for form in (HERMES, LLAMA, mistral(has_args=True), CODER):
        for before in BEFORE:
            for unit in UNITS:
                text = before + unit * (SIZE_CHARS // len(unit))
                whole_ms = min(cpu_ms(form, text, len(text)) for _ in range(2))
                # A twentieth of the text as tokens would bring it: most of this is the calls of `feed` themselves.
                pieces_us = cpu_ms(form, text[: SIZE_CHARS // 20], 4) * 1e3 / (SIZE_CHARS // 80)
                found.append((whole_ms, pieces_us, form.name, before, unit))
    for whole_ms, pieces_us, name, before, unit in sorted(found, reverse=True)[:8]:
        print(f"{whole_ms:7.0f} ms, {pieces_us:.1f} µs a piece of 4  {name:<12} {before!r} + {unit!r} × n")
    result = {
        "benchmark": "tool_reader",
        "chars": SIZE_CHARS,
        "worst_whole_ms": round(max(found)[0], 1),
        "worst_piece_of_4_us": round(max(each[1] for each in found), 1),
    }
    print(json.dumps(result))
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
