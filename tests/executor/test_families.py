"""Families beyond their small models: what is special about their lengths and their layers."""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import copied, edit_config, edit_weights, executor_of, prompts
from tests.support.driver import Driver
from tests.support.small_models import CASES, random_model


def test_longrope_goes_by_the_longest_sequence_there_may_be(tmp_path: Path) -> None:
    model = random_model("Phi3Config", CASES["phi3-longrope"][1] | {"original_max_position_embeddings": 64})
    model.save_pretrained(tmp_path)
    prompt, long = prompts(1, low=20, high=20)[0], prompts(1, low=70, high=70)[0]

    def expected(tokens: list[int]) -> list[int]:
        with torch.no_grad():
            out: torch.Tensor = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)
        return out[0, len(tokens) :].tolist()

    short, whole = executor_of(tmp_path, max_model_len=64), executor_of(tmp_path)
    assert short.info.fingerprint != whole.info.fingerprint
    for executor, tokens in ((short, prompt), (whole, long)):
        driver = Driver(executor)
        assert driver.generate(driver.admit(tokens), count=20) == [expected(tokens)]


@pytest.mark.parametrize(
    ("case", "name"),
    [("glm4-moe", "model.layers.3.eh_proj.weight"), ("ernie4.5-moe", "model.mtp_block.0.mlp.up_proj.weight")],
)
def test_layers_that_guess_ahead_are_left(case: str, name: str, tmp_path: Path) -> None:
    path = copied(case, tmp_path / case)
    edit_config(path, num_nextn_predict_layers=1)
    edit_weights(path, {name: torch.ones(4)})
    assert executor_of(path).info.fingerprint == executor_of(case).info.fingerprint


def test_layers_that_read_others_keys_take_no_pages() -> None:
    """Six layers, of which two read others' keys; the widest has two heads of 32."""
    info = executor_of("gemma4").info
    assert info.block_bytes * len(info.groups) == 4 * 2 * 8 * 64 * 4  # a layer in a page of each group
    assert info.num_blocks == 2**22 // info.block_bytes
