"""Finds how to read the config.json of an architecture: of a text model, or the text part of a multimodal model.
catalogue.py lists the architectures, family_table.py has the entries of their families."""

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.executor.loading.fields import Fields
from penstock.executor.models import families, gemma4, moe_families, recurrent_families
from penstock.executor.models.catalogue import FAMILIES, TEXT_PARTS, missing
from penstock.executor.models.family_table import MODEL_FAMILIES, ModelFamily
from penstock.executor.models.spec import DecoderSpec

_MODULES = families, gemma4, moe_families, recurrent_families


def _read(family: ModelFamily, fields: Fields) -> DecoderSpec:
    reader = next(getattr(module, family.reader) for module in _MODULES if hasattr(module, family.reader))
    spec: DecoderSpec = reader(family.completed(fields), family)
    return spec


ARCHITECTURES: dict[str, Callable[[Fields], DecoderSpec]] = {
    f"{name}ForCausalLM": partial(_read, MODEL_FAMILIES[entry])
    for family in FAMILIES
    for name, entry in family.architectures.items()
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
