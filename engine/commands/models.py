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
    print(json.dumps(rows(), indent=2) if args.json else table())
    return 0


def rows() -> list[dict[str, object]]:
    """Return an object per family, as JSON has it."""
    rows = []
    for family in FAMILIES:
        names = [f"{name}ForCausalLM" for name in family.architectures]
        rows.append(asdict(family) | {"architectures": names, "dtypes": DTYPES, "stored": STORED})
    return rows


def table() -> str:
    """Return the families as a Markdown table, which is also readable in a terminal."""
    lines: list[tuple[str, ...]] = [("family", "architecture", "", "GGUF", "tool calls", "reasoning")]
    for family in FAMILIES:
        lists = (family.architectures, family.features, family.gguf, family.tools)
        lines.append((family.name, *map(", ".join, lists), family.reasoning))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    drawn = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return "\n".join((*drawn, "", f"Computed in {', '.join(DTYPES)}. Stored as {'; '.join(STORED)}."))
