"""Models that classify, against transformers: a head of labels, or two tokens that stand for no and yes."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.executor.protocol import ExecutorError, Sampling
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import executor_of
from tests.support.driver import GREEDY, Driver
from tests.support.refusals import table
from tests.support.small_models import CASES, SIZES, randomize, reference

PROMPTS = [[5, 9, 12, 80, 3], [7] * 40, [11, 3]]


def classifier(path: Path, case: str, **fields: Any) -> Any:
    """A random one of transformers, saved."""
    import transformers

    name, sizes = CASES[case]
    torch.manual_seed(11)
    config = getattr(transformers, name)(**deepcopy(sizes), **fields)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomize(model)
    model.eval().save_pretrained(path)
    return model


def found(executor: UniprocExecutor, chunk: int, sampling: Sampling = GREEDY) -> Iterator[np.ndarray]:
    driver = Driver(executor)
    for prompt in PROMPTS:
        sequence = driver.admit(prompt, sampling, pooling="labels")
        result = driver.advance(sequence, chunk=chunk)
        while not result.embeddings:
            result = driver.advance(sequence, chunk=chunk)
        yield np.frombuffer(result.embeddings[0], "<f4")


@pytest.mark.parametrize(
    ("case", "num_labels"),
    [("llama", 3), ("qwen3", 1), ("qwen2", 2), ("gemma3", 4), ("mistral-sliding", 1), ("qwen2-moe", 2), ("opt", 3)],
)
def test_the_numbers_of_the_labels_are_those_of_transformers(tmp_path: Path, case: str, num_labels: int) -> None:
    model = classifier(tmp_path, case, num_labels=num_labels)
    executor = executor_of(tmp_path)
    labels = executor.info.labels
    assert labels is not None and labels.names == tuple(f"LABEL_{index}" for index in range(num_labels))
    assert labels.activation == ("sigmoid" if num_labels == 1 else "softmax") and labels.tokens is None
    for prompt, values in zip(PROMPTS, found(executor, chunk=17), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def test_two_tokens_stand_for_no_and_yes_where_the_config_says_so() -> None:
    asked = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    executor = executor_of("qwen3", hf_overrides=asked)
    assert executor.info.labels is not None and executor.info.labels.tokens == ("no", "yes")
    for prompt, values in zip(PROMPTS, found(executor, 100, Sampling(allowed_ids=(90, 4))), strict=True):
        with torch.no_grad():
            expected = reference("qwen3")(torch.tensor([prompt])).logits[0, -1, [90, 4]]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def test_what_the_config_says_of_labels_is_read_or_refused_by_name(tmp_path: Path) -> None:
    classifier(tmp_path, "llama", id2label={0: "bad", 1: "good"}, problem_type="multi_label_classification")
    labels = executor_of(tmp_path).info.labels
    assert labels is not None and labels.names == ("bad", "good") and labels.activation == "sigmoid"
    for overrides, complaint in table(__file__, "labels"):
        with pytest.raises(ExecutorError, match=complaint):
            executor_of(tmp_path, hf_overrides=overrides)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == SIZES["vocab_size"]
    assert executor_of("llama").info.labels is None
