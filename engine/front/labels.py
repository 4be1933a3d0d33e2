"""Requests to classification models, and the meaning of their outputs; for the server and the offline LLM."""

import numpy as np

from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import LabelInfo, ModelInfo


def labels_of(info: ModelInfo, is_scored: bool = False) -> LabelInfo:
    """Return the model's labels; raise InvalidRequest if it has none, or for a score if it has several."""
    if info.labels is None:
        raise InvalidRequest(
            "model",
            f"{info.architecture} has no labels: classifying and scoring take a model with a classification head, or "
            "classifier_from_token in its config or in hf_overrides; for other models, compare embeddings",
        )
    if is_scored and len(info.labels.names) != 1:
        raise InvalidRequest(
            "model", f"it has {len(info.labels.names)} labels; a score requires exactly one: use classify"
        )
    return info.labels


def asking_for(labels: LabelInfo, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the sampling parameters of a request with `pooling="labels"`."""
    if labels.tokens is None:
        return SamplingParams(max_tokens=1, detokenize=False)
    ids = [None if tokenizer is None else tokenizer.backend.token_to_id(text) for text in labels.tokens]
    if None in ids:
        missing = labels.tokens[ids.index(None)]
        raise InvalidRequest("model", f"classifier_from_token: {missing!r} is no token of the model's vocabulary")
    return SamplingParams(max_tokens=1, detokenize=False, allowed_token_ids=[id_ for id_ in ids if id_ is not None])


def shown(labels: LabelInfo, numbers: bytes) -> list[float]:
    """Return one number for each label: its probability, or the output of a regression model."""
    values = np.frombuffer(numbers, "<f4").astype(float)
    if labels.tokens is not None:
        values = values[1:2] - values[:1]  # the softmax of two logits is the sigmoid of their difference
    if labels.activation == "sigmoid":
        values = 1 / (1 + np.exp(-np.maximum(values, -700)))
    elif labels.activation != "identity":
        powers = np.exp(values - values.max())
        values = powers / powers.sum()
    found: list[float] = values.tolist()
    return found
