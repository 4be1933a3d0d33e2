"""The error of a model that cannot be used, and the check of a file's size before it is read."""

from pathlib import Path


class ModelError(ValueError):
    """The model cannot be used: it does not exist, or is code, pickle or broken data. The message names the path and says
    what to do."""


def check_size(name: str, path: Path, most: int) -> None:
    """Refuse a file that is too large, before it is read."""
    if path.stat().st_size > most:
        raise ModelError(f"{name}: {path} has {path.stat().st_size} bytes; at most {most} are read")
