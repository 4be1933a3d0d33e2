"""The supported model families, and known models that are refused by name. `penstock models` lists them.

The tables are catalogue.json, plain data: this module imports no torch. families.json tells how configs are read.
tests/executor/test_catalogue.py checks the rows against the families' specs and the supported GGUF architectures.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True)
class Family:
    name: str
    architectures: dict[str, str]  # name in config.json without ForCausalLM → entry of families.json
    # window: sliding-window layers; experts: MoE; MLA: multi-head latent attention; unrotated: layers without RoPE;
    # caps: soft-capped scores and logits; sinks: attention sinks; longrope: different rotations for short and long
    # contexts; recurrent: layers with a state; text of images: only the text part of a multimodal model.
    features: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()  # architectures of GGUF files
    tools: tuple[str, ...] = ()  # tool-call formats of the models' chat templates
    reasoning: str = ""


@dataclass(frozen=True)
class Catalogue:
    families: tuple[Family, ...]
    # Multimodal models of which only the text part runs: `model_type` of their `text_config` → class of the text part.
    text_parts: dict[str, dict[str, str]]
    refused: dict[str, str]  # prefix of the name of a known, unsupported architecture → the missing features


_CATALOGUE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=Catalogue)
FAMILIES, TEXT_PARTS = _CATALOGUE.families, _CATALOGUE.text_parts


def runs(architecture: str) -> bool:
    """Tell whether the executor supports this architecture of config.json, or at least its text part."""
    return architecture in TEXT_PARTS or any(
        architecture == f"{name}ForCausalLM" for family in FAMILIES for name in family.architectures
    )


def missing(architecture: str) -> str | None:
    """Return the features that a known, unsupported architecture would need; None for other names."""
    found = [name for name in _CATALOGUE.refused if architecture.startswith(name)]
    return _CATALOGUE.refused[max(found, key=len)] if found else None
