"""Penstock's public names, each imported when it is first used: `import penstock` costs milliseconds and no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.output import RequestOutput
    from penstock.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "penstock.engine.llm",
    "RequestOutput": "penstock.engine.output",
    "SamplingParams": "penstock.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
