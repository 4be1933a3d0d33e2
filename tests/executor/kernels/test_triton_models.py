"""Whole models on the Triton kernels, through runner and sampler, against transformers."""

import pytest
import torch

from penstock.executor.kernels import Ops
from penstock.executor.kernels.card import Card
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.kernels.select import select_ops
from penstock.executor.models.spec import LatentSpec
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.support import cards
from tests.support.driver import Driver
from tests.support.packed_models import folders
from tests.support.small_models import folder, greedy
from tests.support.twins import changed, operations, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin

PROMPTS = [[5, 17, 3, 99, 42, 8, 71, 150], [7, 7, 21]]
COUNT = 3
SLOW = [
    pytest.param(case, marks=pytest.mark.slow)
    for case in ("gemma3", "gemma4", "gpt-oss", "mistral-sliding", "deepseek-v2-lite", "opt")
]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", ["qwen3", *SLOW])
def test_a_model_gives_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, case: str
) -> None:
    """Two prompts in chunks, then decoding, one a step ahead of the other; stale blocks are NaN."""
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: OPS)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    executor = UniprocExecutor(
        ExecutorConfig(
            model=str(folder(case)),
            device="cuda" if device.type == "cuda" else "cpu",
            dtype="float32",
            kv_cache_bytes=2**18,
            block_size=4,
            max_num_seqs=2,
        )
    )
    executor._rank.kv.fill_(float("nan"))
    driver = Driver(executor)
    sequences = [driver.admit(prompt) for prompt in PROMPTS]
    got = driver.generate(*sequences, count=COUNT, chunk=5)
    assert got == [greedy(case, prompt, COUNT)[0] for prompt in PROMPTS]


@pytest.mark.slow_in_interpreter
@pytest.mark.usefixtures("few_programs")
def test_chunks_whose_latents_are_expanded_give_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Beside rows of one token, chunks too short for it, and what earlier steps left in the pages."""
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: OPS)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    monkeypatch.setattr(LatentSpec, "is_expanded", lambda self, count: count > 2)
    config = ExecutorConfig(
        model=str(folder("deepseek-v2-lite")),
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="float32",
        kv_cache_bytes=2**18,
        block_size=4,
        max_num_seqs=3,
    )
    executor = UniprocExecutor(config)
    executor._rank.kv.fill_(float("nan"))
    driver = Driver(executor)
    prompts = [*PROMPTS, [9, 4]]
    sequences = [driver.admit(prompt) for prompt in prompts]
    assert driver.generate(*sequences, count=COUNT, chunk=5) == [
        greedy("deepseek-v2-lite", prompt, COUNT)[0] for prompt in prompts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "deepseek-v3"])
def test_a_model_of_eight_bits_is_near_its_twin(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    case: str,
    recorded: list[torch.Tensor],
) -> None:
    """Weights and pages. Where a sum falls between two numbers of eight bits, kernel and twin may take either."""
    twins = changed(torch_ops, blocks=eight_bits_twin)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    for ops, where in ((OPS, device.type), (twins, "cpu")):
        monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_, ops=ops: ops)
        config = ExecutorConfig(
            model=str(folders(case)[0]),
            device="cuda" if where == "cuda" else "cpu",
            dtype="float32",
            kv_cache_dtype="fp8",
            enforce_eager=True,
            kv_cache_bytes=2**18,
            block_size=4,
            max_num_seqs=2,
        )
        driver = Driver(UniprocExecutor(config))
        driver.generate(driver.admit(PROMPTS[0]), count=1, chunk=5)
    actual, expected = recorded[-2].cpu(), recorded[-1]
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("card", [cards.A100, cards.L40S, cards.H200, cards.B200, cards.RTX_PRO])
def test_what_a_gpu_lacks_is_left_out_and_the_rest_is_kernels(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setattr("penstock.executor.kernels.select.card_of", lambda _: card)
    ops = select_ops(torch.device("cuda", 0), torch.bfloat16, 128)
    assert all(getattr(ops, name) is getattr(OPS, name) for name in operations(Ops) if name != "blocks")
    assert ops.blocks is (OPS.blocks if card.capability >= (8, 9) else None)


def test_a_gpu_that_is_too_old_for_the_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = Card((7, 5), 40, 64 << 10)
    monkeypatch.setattr("penstock.executor.kernels.select.card_of", lambda _: turing)
    with pytest.raises(ExecutorError, match="this GPU has compute capability 7.5; 8.0 .* or later is needed"):
        select_ops(torch.device("cuda", 0), torch.bfloat16, 128)
