"""`penstock.open_forward`: a model without the engine around it, for a trainer. Importing this module imports torch."""

from typing import Any

from penstock.engine.config import engine_config
from penstock.engine.model_files import resolve_model
from penstock.executor.forward import Forward


def open_forward(model: str | None = None, *, revision: str | None = None, **options: Any) -> Forward:
    """Load `model`, as `LLM` does, as a function of token sequences: `forward(sequences)` returns logits, and
    `forward.logprobs(sequences)` the log-probabilities of their tokens, with the bits that an LLM with the same options
    samples with. The options are those of `LLM`; options for requests and caches have no effect."""
    files = resolve_model(model, revision=revision, need_weights=options.get("load_format") != "dummy")
    return Forward(engine_config(str(files.path), options).executor)
