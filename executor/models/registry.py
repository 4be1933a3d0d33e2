"""Finds the code for the architecture in config.json: a text model, the text part of a multimodal model, or the model
beneath a classification head. catalogue.py lists the architectures."""

from collections.abc import Callable
from typing import Any

from penstock.executor.loading.fields import Fields
from penstock.executor.models import families, gemma4, moe_families, recurrent_families
from penstock.executor.models.catalogue import FAMILIES, TEXT_PARTS, missing
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.protocol import Activation, LabelInfo

_MODULES = families, gemma4, moe_families, recurrent_families
ARCHITECTURES: dict[str, Callable[[Fields], DecoderSpec]] = {
    f"{name}ForCausalLM": next(getattr(module, reader) for module in _MODULES if hasattr(module, reader))
    for family in FAMILIES
    for name, reader in family.architectures.items()
}
HEAD = "score.weight"
ENDING = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
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


def without_head(config: dict[str, Any], where: str) -> tuple[dict[str, Any], LabelInfo | None]:
    """Return the config of the model beneath a classification head and the head's labels; for other models, their
    config and None. A classifier is a text model that has a head with one row per label instead of the LM head
    (transformers' …ForSequenceClassification), or two tokens of its vocabulary that mean no and yes."""
    fields = Fields(config, where)
    name, tokens = (fields.texts("architectures") or [""])[0], fields.texts("classifier_from_token")
    if tokens is not None and len(tokens) != 2:
        raise fields.error("classifier_from_token", tokens, "two tokens, of no and of yes,")
    if name.endswith(ENDING):
        family = name.removesuffix(ENDING)
        bases = [f"{each}ForCausalLM" for each in (family, family.removesuffix("Text"))]
        config = {**config, "architectures": [next((base for base in bases if base in ARCHITECTURES), name)]}
    elif tokens is None:
        return config, None
    if tokens is not None:
        return config, LabelInfo(names=("LABEL_0",), activation="sigmoid", tokens=(tokens[0], tokens[1]))
    names = _names(fields)
    kind = fields.text("problem_type", "")
    activation = _ACTIVATIONS.get(kind)
    if kind and activation is None:
        raise fields.error("problem_type", kind, f"one of {', '.join(_ACTIVATIONS)}")
    activation = activation or ("sigmoid" if len(names) == 1 else "softmax")
    return {**config, "tie_word_embeddings": True}, LabelInfo(names=names, activation=activation)  # there is no lm_head


def _names(fields: Fields) -> tuple[str, ...]:
    named = fields.section("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 2, high=4096)))
    if sorted(named.names()) != sorted(str(index) for index in range(len(named.names()))):
        raise fields.error("id2label", named.names(), "the labels' numbers from 0 on")
    return tuple(named.text(str(index)) for index in range(len(named.names())))


def find_architecture(fields: Fields) -> tuple[str, Callable[[Fields], DecoderSpec]]:
    """Return the first entry of `architectures`, and the function that reads its settings."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        if names and (needed := missing(names[0])):
            raise fields.error("architectures", names, f"a family of `penstock models`; {names[0]} needs {needed}")
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return names[0], ARCHITECTURES[names[0]]
