"""Reads the sources of chat templates, which have a limited size."""

from pathlib import Path

from penstock.engine.model_error import ModelError, check_size

MAX_TEMPLATE_BYTES = 1 << 20


def read_template(name: str, path: Path) -> str:
    """Read the source of a chat template."""
    check_size(name, path, MAX_TEMPLATE_BYTES)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{name}: {path} is not UTF-8 text ({error})") from None
