"""The command `penstock models`: prints the supported model families as a table or as JSON, without importing torch."""

import argparse
import json
from dataclasses import asdict

from penstock.executor.models.catalogue import FAMILIES

USER_ERRORS: tuple[type[Exception], ...] = ()
DTYPES = ("bfloat16", "float32", "float16 (GPU)")
STORED = (
    "safetensors: float32, bfloat16, float16, FP8 in blocks of 128 × 128, AWQ, GPTQ, compressed-tensors, MXFP4 (gpt-oss)",
    "GGUF: floats and codes of 2 to 8 bits",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON array of objects instead of a table")


def run(args: argparse.Namespace) -> int:
    rows = table()
    print(json.dumps(rows, indent=2) if args.json else as_text(rows))
    return 0


def table() -> list[dict[str, object]]:
    """Return a row per family."""
    rows: list[dict[str, object]] = []
    for family in FAMILIES:
        names = [f"{name}ForCausalLM" for name in family.architectures]
        rows.append(asdict(family) | {"architectures": names, "dtypes": DTYPES, "stored": STORED})
    return rows


def as_text(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table, which is also readable in a terminal."""
    columns = {"name": "family", "architectures": "architecture", "features": "", "gguf": "GGUF", "tools": "tool calls"}
    columns["reasoning"] = "reasoning"
    lines = [tuple(columns.values())]
    for row in rows:
        cells = (row[name] for name in columns)
        texts = (cell if isinstance(cell, str) else ", ".join(cell) for cell in cells)  # type: ignore[arg-type]
        lines.append(tuple(text.replace("ForCausalLM", "") for text in texts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    drawn = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return "\n".join((*drawn, "", f"Computed in {', '.join(DTYPES)}. Stored as {'; '.join(STORED)}."))
