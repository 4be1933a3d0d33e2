"""The model's own draft layer, beside a model of transformers with that one layer."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.executor.protocol import ExecutorError, Row
from tests.executor.test_graphs import SMALL, Recorder, open_small
from tests.support.checkpoints import copied, edit_config, edit_weights, executor_of, refusal
from tests.support.draft_models import draft_model
from tests.support.driver import Driver, Sequence
from tests.support.refusals import hardest, hardest_rows
from tests.support.small_models import ONE_LAYER

PROMPT = [(5 * i * i + 11 * i) % 150 + 2 for i in range(29)]


def asking(driver: Driver, sequence: Sequence, count: int, ask: int) -> Row:
    """Return a row of the next positions that asks for so many drafts, as far as the blocks reach."""
    row = driver.row(sequence, count)
    reach = len(sequence.blocks) * driver.block_size - (row.start + row.count)
    return msgspec.structs.replace(row, drafts=min(ask, 1 + reach) if row.sample else 0)


def opened(
    monkeypatch: pytest.MonkeyPatch, path: Path, recorder: Recorder | None, chunks: tuple[int, ...] = (), **options: Any
) -> Driver:
    """Open a model on a CPU, or as on a GPU if there is a recorder for graphs."""
    if recorder is None:
        return Driver(executor_of(path, **SMALL, **options))
    return Driver(open_small(monkeypatch, path, recorder, chunks, **options))


ON_CPU, AS_ON_GPU = ([(case, has_graphs) for case in ONE_LAYER] for has_graphs in (False, True))
FAST = [*ON_CPU, ("deepseek-v3", True)]


@pytest.mark.parametrize(("case", "has_graphs"), hardest_rows(ON_CPU + AS_ON_GPU, FAST))
def test_drafts_are_those_of_the_layer(
    case: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step replays a graph of the forward pass and one of the draft layer, beside that of the draw of decode steps."""
    model, recorder = draft_model(case, tmp_path / case), Recorder()
    driver = opened(monkeypatch, model.path, recorder if has_graphs else None, (8, 32), draft_tokens=3)
    sequence, other = driver.admit(PROMPT), driver.admit(PROMPT[:5])
    for chunk in (13, None, *[None] * 12):
        count = chunk or len(sequence.tokens) - sequence.computed
        row, beside = asking(driver, sequence, count, 3), asking(driver, other, len(other.tokens) - other.computed, 1)
        drafts = driver.step((sequence, row), (other, beside)).drafts
        assert drafts.get(0, []) == model.drafts(sequence.tokens, row.drafts), sequence.tokens
        assert drafts.get(1, []) == model.drafts(other.tokens, beside.drafts)
    assert sum(recorder.replays) == (2 * 2 + 12 * 3) * has_graphs


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("case", hardest(["qwen3.5", "glm4-moe"], "qwen3.5"))
def test_drafts_follow_the_last_right_row(
    case: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step computes two drafts of one request beside another; the layer goes on after what the last right row samples."""
    model, recorder = draft_model(case, tmp_path / case), Recorder()
    executor = opened(monkeypatch, model.path, recorder if has_graphs else None, draft_tokens=2).executor
    for num_right in range(3):
        driver = Driver(executor)
        other, sequence, plain = driver.admit(PROMPT[:7]), driver.admit(PROMPT), driver.admit(PROMPT)
        driver.generate(plain, count=4)
        driver.advance(other, sequence)
        wrong = [(token + 1) % 150 for token in plain.output[1:3]]
        drafts = [*plain.output[1 : 1 + num_right], *wrong][:2]
        first, beside = asking(driver, sequence, 1, 2), asking(driver, other, 1, 1)
        driver._extend(sequence, first.start + 4)
        blocks, sequence.unsent_blocks = tuple(sequence.blocks[first.first_block :]), len(sequence.blocks)
        start, replays = len(sequence.tokens), sum(recorder.replays)
        head = msgspec.structs.replace(first, blocks=blocks, first_token=start, tokens=tuple(drafts), drafts=2)
        rows = [beside, head, *(Row(sequence.slot, start + i, 1, True, drafts=2) for i in range(2))]
        result = driver.step_unchecked(*((sequence, row) for row in rows))
        assert sum(recorder.replays) == replays + 3 * has_graphs
        last = 1 + num_right
        assert result.tokens[1 : last + 1] == plain.output[1 : last + 1]
        assert result.drafts[last] == model.drafts([*sequence.tokens, *result.tokens[1 : last + 1]], 2)
        assert result.drafts[0] == model.drafts([*other.tokens, result.tokens[0]], 1)
        if num_right == 2:  # what the layer has stored for the right drafts is that of their own rows
            sequence.tokens += result.tokens[1:]
            sequence.computed += 3
            again = driver.step((sequence, asking(driver, sequence, 1, 2))).drafts
            assert again[0] == model.drafts(sequence.tokens, 2)


def test_the_layer_is_in_the_fingerprint_and_in_the_pages(tmp_path: Path) -> None:
    model = draft_model("glm4-moe", tmp_path / "model")
    with_layer, without = (executor_of(model.path, draft_tokens=count).info for count in (1, 0))
    assert with_layer.fingerprint != without.fingerprint
    assert with_layer.block_bytes * 3 == without.block_bytes * 4


def test_a_draft_layer_without_its_tensors_is_refused(tmp_path: Path) -> None:
    path = copied("glm4-moe", tmp_path / "model")
    edit_config(path, num_nextn_predict_layers=1)
    assert "the model has no layer for multi-token prediction" in refusal(path, draft_tokens=1)
    edit_weights(path, {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)})
    with pytest.raises(ExecutorError, match=r"tensor 'model\.layers\.3\..*' .* is missing"):
        executor_of(path, draft_tokens=1)
