"""Models that classify a text. They are those that write it, with a head of a row for each label in place of the
vocabulary's (transformers' …ForSequenceClassification), or with two tokens of the vocabulary that stand for no and yes."""

from typing import Any

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import ARCHITECTURES
from penstock.executor.protocol import Activation, LabelInfo

HEAD = "score.weight"
ENDING = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def without_head(config: dict[str, Any], where: str) -> tuple[dict[str, Any], LabelInfo | None]:
    """The config of the model beneath a classifier's head, and what the head says; of another model its own, and None."""
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
