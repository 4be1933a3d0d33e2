"""The command `penstock models`: lists the supported families, or the models in the hub's cache, without importing torch."""

import argparse
import contextlib
import json
from dataclasses import asdict
from typing import Any

from penstock.engine.model_error import ModelError
from penstock.engine.model_files import resolve_model
from penstock.executor.gguf_header import GgufHeader
from penstock.executor.models.catalogue import FAMILIES, missing, runs
from penstock.executor.protocol import ExecutorError

USER_ERRORS: tuple[type[Exception], ...] = ()
DTYPES = ("bfloat16", "float32", "float16 (GPU)")
STORED = (
    "safetensors: float32, bfloat16, float16, FP8 in blocks of 128 × 128, AWQ, GPTQ, compressed-tensors, MXFP4 (gpt-oss)",
    "GGUF: floats and codes of 2 to 8 bits",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON array of objects instead of a table")
    parser.add_argument(
        "--local",
        action="store_true",
        help="list the models in the hub's cache on this machine (HF_HOME, HF_HUB_CACHE)",
    )


def run(args: argparse.Namespace) -> int:
    found = local_rows() if args.local else rows()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(local_table(found) if args.local else table())
    return 0


def local_rows() -> list[dict[str, Any]]:
    """Return an object per model in the hub's cache, by its newest revision there."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    rows: list[dict[str, Any]] = []
    with contextlib.suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model" and repo.revisions:
                newest = max(repo.revisions, key=lambda revision: revision.last_modified)
                read = _read_local(str(newest.snapshot_path), repo.repo_id)
                rows.append({"model": repo.repo_id, **read, "bytes": repo.size_on_disk})
    return rows


def _read_local(folder: str, name: str) -> dict[str, str]:
    """Return the architecture of a model, and whether it is supported: yes, or no and the reason."""
    try:
        files = resolve_model(folder)
        names = files.config.get("architectures")
        if files.kind == "gguf":
            names = [GgufHeader(files.path).metadata.get("general.architecture")]
    except (ModelError, ExecutorError) as error:
        return {"architecture": "", "supported": "no: " + str(error).removeprefix("model: ").replace(folder, name)}
    architecture = str(names[0] if isinstance(names, list) and names else names)
    is_known = runs(architecture) or any(architecture in family.gguf for family in FAMILIES)
    needs = missing(architecture)
    verdict = "yes" if is_known else f"no: it needs {needs}" if needs else "no: an unknown architecture"
    return {"architecture": architecture, "supported": verdict}


def local_table(models: list[dict[str, Any]]) -> str:
    head = ("model", "architecture", "supported", "size")
    lines = [(*(row[name] for name in head[:3]), f"{row['bytes'] / 2**30:.2f} GiB") for row in models]
    return drawn([head, *lines]) if models else "no model is in the hub's cache; `penstock serve ORG/NAME` adds one"


def rows() -> list[dict[str, Any]]:
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
    return "\n".join((drawn(lines), "", f"Computed in {', '.join(DTYPES)}. Stored as {'; '.join(STORED)}."))


def drawn(lines: list[tuple[str, ...]]) -> str:
    """Return a Markdown table, whose first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ruled = [lines[0], tuple("-" * width for width in widths), *lines[1:]]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in ruled)
