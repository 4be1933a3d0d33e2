"""Whole models on the Triton kernels, through runner and sampler, against transformers; features and sizes that depend on the GPU.
test_triton_compiled.py shows that the tiles fit."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from penstock.executor.kernels import Ops
from penstock.executor.kernels import card as card_module
from penstock.executor.kernels.card import Card, card_of, current_card
from penstock.executor.kernels.cuda.attention_ops import num_splits
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.select import select_ops
from penstock.executor.models.spec import LatentSpec
from penstock.executor.protocol import ExecutorError
from tests.support import cards
from tests.support.cards import H200, L40S, RTX_PRO
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.packed_models import folders
from tests.support.refusals import cases, hardest_rows
from tests.support.small_models import greedy
from tests.support.twins import changed, operations, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin

PROMPTS = [[5, 17, 3, 99, 42, 8, 71, 150], [7, 7, 21], [9, 4]]
COUNT = 3
GPU = torch.device("cuda", 0)
SMALL: dict[str, Any] = {"kv_cache_bytes": 2**20, "block_size": 4, "max_num_seqs": 3}
EXPANDED = pytest.param("deepseek-v2-lite", True, marks=pytest.mark.slow_in_interpreter)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("case", "is_expanded"), [*hardest_rows(cases(__file__, "whole models"), []), EXPANDED])
def test_a_model_gives_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, case: str, is_expanded: bool
) -> None:
    """Prompts in chunks, then decoding, one a step ahead of the others; stale blocks are NaN. Chunks of three tokens
    and more expand their latents if so asked."""
    compute_with(monkeypatch, OPS)
    if is_expanded:
        monkeypatch.setattr(LatentSpec, "is_expanded", lambda self, count: count > 2)
    executor = executor_of(case, device=device.type, **SMALL)
    executor._rank.kv.fill_(float("nan"))
    driver = Driver(executor)
    got = driver.generate(*[driver.admit(prompt) for prompt in PROMPTS], count=COUNT, chunk=5)
    assert got == [greedy(case, prompt, COUNT)[0] for prompt in PROMPTS]


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize("case", ["qwen3", "deepseek-v3"])
def test_a_model_of_eight_bits_is_near_its_twin(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    case: str,
    recorded: list[torch.Tensor],
) -> None:
    """Weights and pages. Where a sum falls between two numbers of eight bits, kernel and twin may take either."""
    twins = changed(torch_ops, blocks=eight_bits_twin)
    for ops, where in ((OPS, device.type), (twins, "cpu")):
        compute_with(monkeypatch, ops)
        options = SMALL | {"device": where, "kv_cache_dtype": "fp8", "enforce_eager": True}
        driver = Driver(executor_of(folders(case)[0], **options))
        driver.generate(driver.admit(PROMPTS[0]), count=1, chunk=5)
    actual, expected = recorded[-2].cpu(), recorded[-1]
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("card", [cards.A100, cards.L40S, cards.H200, cards.B200, cards.RTX_PRO])
def test_what_a_gpu_lacks_is_left_out_and_the_rest_is_kernels(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setattr("penstock.executor.kernels.select.card_of", lambda _: card)
    ops = select_ops(GPU, torch.bfloat16, 128)
    assert all(getattr(ops, name) is getattr(OPS, name) for name in operations(Ops) if name != "blocks")
    assert ops.blocks is (OPS.blocks if card.capability >= (8, 9) else None)
    if card is cards.B200:
        with pytest.raises(ExecutorError, match=r"batch_invariant: given; .* 8\.x, 9\.0 or 12\.x"):
            select_ops(GPU, torch.bfloat16, 128, True)
    else:
        fixed = select_ops(GPU, torch.bfloat16, 128, True)
        assert isinstance(fixed, InvariantOps) and (fixed.blocks is None) == (ops.blocks is None)


def test_a_gpu_that_is_too_old_for_the_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = Card((7, 5), 40, 64 << 10)
    monkeypatch.setattr("penstock.executor.kernels.select.card_of", lambda _: turing)
    with pytest.raises(ExecutorError, match="this GPU has compute capability 7.5; 8.0 .* or later is needed"):
        select_ops(GPU, torch.bfloat16, 128)


@pytest.mark.parametrize(("card", "features"), cases(__file__, "features of cards", **vars(cards)))
def test_each_card_has_its_features(card: Card, features: tuple[str, ...]) -> None:
    assert tuple(name for name in dir(card) if name.startswith("has_") and getattr(card, name)) == features


@pytest.mark.parametrize(("version", "has_it"), cases(__file__, "versions of CUDA"))
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
