"""Checkpoints that cannot run are refused by field or by tensor, and options that a model does not have by name.

The rows of checkpoints are in tests/support/refused.json.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import gguf_files
from tests.support.checkpoints import REFUSED, copied, edit_config, edit_weights, has_words, refusal, tensor_of
from tests.support.refusals import table
from tests.support.small_models import folder
from tests.support.stored_models import stored

UP = "model.layers.0.mlp.up_proj"
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}}
ROWS = [(section, *row) for section in ("configs", "tensors", "gguf") for row in REFUSED[section]]


@pytest.mark.parametrize(("section", "name", "changes", "words"), ROWS)
def test_a_checkpoint_that_is_not_computed_is_refused_by_field_tensor_or_key(
    section: str, name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / ("model.gguf" if section == "gguf" else "model")
    if section == "gguf":
        gguf_files.written(name, path, **changes)
    else:
        copied(stored(name)[0], path)
    if section == "tensors":
        edit_weights(path, {tensor.replace("UP", UP): tensor_of(given) for tensor, given in changes.items()})
    elif section == "configs":
        if changes.get("quantization_config"):  # the row has the entries that differ
            old = json.loads((path / "config.json").read_text()).get("quantization_config", {})
            changes = {"quantization_config": old | changes["quantization_config"]}
        edit_config(path, **changes)
    message = refusal(path)
    assert has_words(message, words.replace("UP", UP).replace("PATH", str(path))), message
    assert len(message) < 400 or "architectures" in changes or section == "gguf", message


@pytest.mark.parametrize(("case", "options", "words"), table(__file__, "options", YARN=YARN))
def test_options_that_a_model_or_the_machine_cannot_meet_are_refused(
    case: str, options: dict[str, Any], words: str
) -> None:
    message = refusal(folder(case), **options)
    assert has_words(message, words), message
