"""Checkpoints that cannot run are refused by field or by tensor. The rows are in tests/support/refused.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import gguf_files
from tests.support.checkpoints import REFUSED, copied, edit_config, edit_weights, has_words, refusal, tensor_of
from tests.support.stored_models import stored

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED["configs"])
def test_a_config_that_is_not_computed_is_refused_by_field(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = copied(stored(name)[0], tmp_path / "model")
    if changes.get("quantization_config"):  # the row has the entries that differ
        old = json.loads((path / "config.json").read_text()).get("quantization_config", {})
        changes = {"quantization_config": old | changes["quantization_config"]}
    edit_config(path, **changes)
    message = refusal(path)
    assert has_words(message, words.replace("PATH", str(path))), message
    assert len(message) < 400 or "architectures" in changes, message


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED["tensors"])
def test_tensors_that_do_not_fit_are_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = copied(stored(name)[0], tmp_path / "model")
    edit_weights(path, {tensor.replace("UP", UP): tensor_of(given) for tensor, given in changes.items()})
    message = refusal(path)
    words = words.replace("UP", UP).replace("PATH", str(path))
    assert has_words(message, words) and len(message) < 400, message


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED["gguf"])
def test_metadata_of_a_gguf_file_that_does_not_fit_is_refused_by_key(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path, _ = gguf_files.written(name, tmp_path / "model.gguf", **changes)
    message = refusal(path)
    assert has_words(message, words), message
