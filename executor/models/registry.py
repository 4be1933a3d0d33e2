"""Finds the code for the architecture in config.json: a text model, or the text part of a multimodal model. catalogue.py
lists the architectures."""

from collections.abc import Callable
from typing import Any

from penstock.executor.loading.fields import Fields
from penstock.executor.models import families, gemma4, moe_families, recurrent_families
from penstock.executor.models.catalogue import FAMILIES, TEXT_PARTS, missing
from penstock.executor.models.spec import DecoderSpec

_MODULES = families, gemma4, moe_families, recurrent_families
ARCHITECTURES: dict[str, Callable[[Fields], DecoderSpec]] = {
    f"{name}ForCausalLM": next(getattr(module, reader) for module in _MODULES if hasattr(module, reader))
    for family in FAMILIES
    for name, reader in family.architectures.items()
}
_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # allowed in the outer config


def text_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the config of a multimodal model's text part; for any other model, its config."""
    fields = Fields(config, where)
    parts = TEXT_PARTS.get((fields.texts("architectures") or [""])[0])
    if parts is None:
        return config
    fields.required_section("text_config").only("model_type", *parts)
    inner = config["text_config"]
    outer = {name: config[name] for name in _OF_ALL if config.get(name) is not None}
    return {**inner, **outer, "architectures": [parts[inner["model_type"]]]}


def find_architecture(fields: Fields) -> tuple[str, Callable[[Fields], DecoderSpec]]:
    """Return the first entry of `architectures`, and the function that reads its settings."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        if names and (needed := missing(names[0])):
            raise fields.error("architectures", names, f"a family of `penstock models`; {names[0]} needs {needed}")
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return names[0], ARCHITECTURES[names[0]]
