"""The scripts of docs/examples run, and do what they say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_models import SIZES, random_model
from tests.support.text_samples import byte_level

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_grpo_raises_the_reward_of_a_small_model(tmp_path: Path) -> None:
    """It draws from 420 tokens at random at first, and vowels alone at last."""
    random_model("LlamaConfig", {**SIZES, "vocab_size": 420}).save_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    rewards = load("grpo").train(str(tmp_path), steps=9, rate=1e-2)
    assert len(rewards) == 10
    assert min(rewards[-2:]) > 2 * rewards[0]
