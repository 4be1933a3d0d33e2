"""Masks are filled by one thread or many, into buffers that take turns."""

import os
from unittest.mock import Mock

import numpy as np
import pytest
from llguidance import LLExecutor

from penstock.engine.core.grammars import StepMasks
from penstock.engine.grammar import masks as masks_module
from penstock.engine.grammar.masks import MaskFiller
from penstock.engine.grammar.matcher import Matcher
from tests.support.fake_engine import EOS
from tests.support.grammar_rig import VOCAB_SIZE, matcher


def allowed(masks: StepMasks, index: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(masks.bits[index].view(np.uint8), bitorder="little")).tolist())


def after(text: str, **outputs: object) -> Matcher:
    state = matcher(**outputs)
    assert all(state.advance([byte]) for byte in text.encode())
    return state


@pytest.fixture
def filler() -> MaskFiller:
    return MaskFiller(60)


@pytest.mark.parametrize("pool_rows", [1, 1000])
def test_a_set_bit_is_a_token_that_may_follow(
    filler: MaskFiller, pool_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "POOL_ROWS", pool_rows)
    rows = [(3 * number, after("1" * (number % 4), regex="[0-9]{2,4}")) for number in range(60)]
    digits = set(b"0123456789")
    for masks in (filler.fill(rows), filler.fill(rows)):
        assert masks.rows.tolist() == [row for row, _ in rows] and masks.rows.dtype == np.int32
        for index in range(60):
            assert allowed(masks, index) == (digits if index % 4 < 2 else digits | {EOS})
        assert masks.ended == [] and masks.errors == {}


def test_the_buffer_of_the_step_before_is_left_alone(filler: MaskFiller) -> None:
    first = filler.fill([(0, after("", regex="a|b"))])
    second = filler.fill([(0, after("", regex="c"))])
    assert allowed(first, 0) == set(b"ab") and allowed(second, 0) == set(b"c")
    assert not np.shares_memory(first.bits, second.bits)


def test_a_row_after_which_only_an_end_may_follow_has_ended(filler: MaskFiller) -> None:
    late = after("k", grammar='start: "k" TAIL?\nTAIL: /z/ & /y/')
    masks = filler.fill([(5, late), (7, after("", regex="a"))])
    assert masks.ended == [5] and masks.errors == {}
    assert allowed(masks, 0) >= set(range(VOCAB_SIZE)), "what the executor samples there is not read"


def test_a_matcher_that_has_failed_is_reported_and_its_row_allows_all(filler: MaskFiller) -> None:
    broken = matcher(regex="a+")
    assert not broken.advance([ord("b")])
    masks = filler.fill([(0, broken), (1, after("", regex="a"))])
    assert list(masks.errors) == [0] and masks.errors[0]
    assert allowed(masks, 0) >= set(range(VOCAB_SIZE)) and allowed(masks, 1) == {ord("a")}


def test_masks_are_filled_by_no_more_threads_than_the_process_may_use(
    filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_pool = Mock(side_effect=LLExecutor)
    monkeypatch.setattr("llguidance.LLExecutor", open_pool)
    monkeypatch.setattr(masks_module, "POOL_ROWS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert allowed(filler.fill([(0, after("", regex="a"))]), 0) == {ord("a")}
    open_pool.assert_called_once_with(1)
