"""Penstock's public names, each imported on first use, so that `import penstock` is fast and does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.front.llm import LLM
    from penstock.engine.front.offline_call import LoRARequest
    from penstock.engine.front.results import RequestOutput, RequestsFailed
    from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
    from penstock.engine.sampling_params import StructuredOutputs as StructuredOutputsParams

    TextPrompt = TokensPrompt = dict[str, Any]

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "RequestOutput", "RequestsFailed", "SamplingParams", "__version__"]
__all__ += ["StructuredOutputs", "StructuredOutputsParams", "TextPrompt", "TokensPrompt"]

_HOMES = {
    "LLM": ("penstock.engine.front.llm", "LLM"),
    "LoRARequest": ("penstock.engine.front.offline_call", "LoRARequest"),
    "RequestOutput": ("penstock.engine.front.results", "RequestOutput"),
    "RequestsFailed": ("penstock.engine.front.results", "RequestsFailed"),
    "SamplingParams": ("penstock.engine.sampling_params", "SamplingParams"),
    "StructuredOutputs": ("penstock.engine.sampling_params", "StructuredOutputs"),
    "StructuredOutputsParams": ("penstock.engine.sampling_params", "StructuredOutputs"),  # vLLM's name for it
    "TextPrompt": ("builtins", "dict"),  # vLLM's types of prompts, which are dictionaries
    "TokensPrompt": ("builtins", "dict"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
