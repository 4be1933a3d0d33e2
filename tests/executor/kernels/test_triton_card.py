"""Features and sizes that depend on the GPU. test_triton_compiled.py shows that the tiles fit."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from penstock.executor.kernels import card as card_module
from penstock.executor.kernels.card import Card, card_of, current_card
from penstock.executor.kernels.cuda.attention_ops import num_splits
from tests.support import cards, refusals
from tests.support.cards import H200, L40S, RTX_PRO


@pytest.mark.parametrize(("card", "features"), refusals.cases(__file__, "features of cards", **vars(cards)))
def test_each_card_has_its_features(card: Card, features: tuple[str, ...]) -> None:
    assert tuple(name for name in dir(card) if name.startswith("has_") and getattr(card, name)) == features


@pytest.mark.parametrize(
    ("version", "has_it"), [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True), (None, True)]
)
def test_an_older_cuda_needs_no_scaled_mm(monkeypatch: pytest.MonkeyPatch, version: str | None, has_it: bool) -> None:
    """The cuBLAS of CUDA 12.8 would raise in the warm-up's first step."""
    monkeypatch.setattr(torch.version, "cuda", version)
    assert H200.has_scaled_mm == has_it
    monkeypatch.delattr(F, "scaled_mm")
    assert not H200.has_scaled_mm


def test_the_card_is_that_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have several kinds."""
    properties = mock.Mock(major=8, minor=9, multi_processor_count=142, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.__getitem__)
    card_of.cache_clear()
    assert current_card() == L40S
    card_of.cache_clear()


def test_a_larger_gpu_is_filled_by_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for card in (Card((8, 0), 56, 163 << 10), RTX_PRO):
        monkeypatch.setattr(card_module, "_WITHOUT_GPU", card)
        even, programs = num_splits(1, 1, 1 << 20, 0)
        assert (even, programs) == (32, min(512, 3 * card.num_processors))
