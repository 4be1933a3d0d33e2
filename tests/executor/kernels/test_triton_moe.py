"""The experts in Triton against their twin, and both against the loop over experts that a CPU runs."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.executor.kernels import Activation
from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import tiles
from penstock.executor.kernels.cuda.launch import Kernel
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.kernels.eight_bits import are_quantized, pad_scales
from penstock.executor.kernels.weight import BLOCKS, MXFP4, Weight, numbers
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.support.driver import Driver
from tests.support.eight_bits import quantize
from tests.support.kernel_cases import TOLERANCE, close, every_dtype, matrix
from tests.support.paged import random
from tests.support.small_models import folder, greedy
from tests.support.twins import changed, torch_ops
from tests.support.twins import experts as experts_twin
from tests.support.twins.experts import fused_experts

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # tokens, slots, shares, and the two weights


def ours(case: Case, first: int, activation: Activation, added: Tensor | None = None) -> Tensor:
    hidden, slots, shares, gate_up, down = case
    return moe.fused_experts(hidden, slots, shares, numbers(gate_up), numbers(down), first, activation, added)


def twin(case: Case, first: int, activation: Activation, added: Tensor | None = None) -> Tensor:
    hidden, slots, shares, gate_up, down = case
    return fused_experts(hidden, slots, shares, numbers(gate_up), numbers(down), first, activation, added)


def case(
    tokens: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Case:
    choice = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    choice[:, 0] += 0.5  # a favourite, so that some tiles are full and some experts have none
    slots = choice.topk(top_k).indices
    shares = random(tokens, top_k, seed=2).softmax(-1)
    gate_up = random(experts, 2 * inner, width, dtype=dtype, seed=3) / width**0.5
    down = random(experts, width, inner, dtype=dtype, seed=4) / inner**0.5
    hidden = random(tokens, width, dtype=dtype)
    return hidden.to(device), slots.to(device), shares.to(device), gate_up.to(device), down.to(device)


@every_dtype
def test_experts_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    cases: list[tuple[int, int, int, int, int, Activation]] = [
        (9, 5, 2, 64, 64, "silu"),
        (1, 4, 3, 40, 24, "gelu_tanh"),
    ]
    for tokens, experts, top_k, width, inner, activation in cases:
        given = case(tokens, experts, top_k, width, inner, dtype, device)
        hidden, slots, shares, gate_up, down = given
        exact = hidden.double(), slots, shares.double(), gate_up.double(), down.double()
        close(ours(given, 0, activation), twin(exact, 0, activation))


@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.slow_in_interpreter), 128])
def test_experts_with_more_tokens_than_a_tile(monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int) -> None:
    monkeypatch.setattr(moe, "expert_tile", lambda *_: tiles.Tile(rows, 32, 4, 2))
    given = case(70, 3, 2, 32, 32, torch.float32, device)
    close(ours(given, 0, "silu"), twin(given, 0, "silu"))


@matrix("dtype", TOLERANCE, hardest=[(torch.bfloat16,)])
def test_experts_of_eight_bits_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    """384 columns and rows: three blocks, whose scales are padded to four along the depth."""
    hidden, slots, shares, gate_up, down = case(9, 3, 2, 384, 128, dtype, torch.device("cpu"))
    weights = in_blocks(gate_up), in_blocks(down)
    given = hidden.to(device), slots.to(device), shares.to(device)
    exact = fused_experts(hidden.double(), slots, shares.double(), *weights, 0, "silu")
    close(moe.fused_experts(*given, *moved(weights, device), 0, "silu"), exact, dtype)
    unscaled = twin((hidden.double(), slots, shares, gate_up.double(), down.double()), 0, "silu")
    assert (exact - unscaled).norm() < 0.06 * unscaled.norm()


@matrix("tokens, first", (25, 70), (0, 1), hardest=[(25, 0), (70, 1)])
def test_experts_with_many_entries_multiply_in_eight_bits(device: torch.device, tokens: int, first: int) -> None:
    """Kernel and twin may round to different eight-bit numbers. Hopper's tensor cores add eight-bit products in fewer than
    24 bits, so this happens more often there."""
    hidden, slots, shares, gate_up, down = case(tokens, 3, 2, 384, 128, torch.bfloat16, torch.device("cpu"))
    weights = in_blocks(gate_up[first:]), in_blocks(down[first:])
    added = random(tokens, 384, dtype=torch.bfloat16, seed=8)
    assert are_quantized(slots.numel(), 3 - first)
    given = hidden.to(device), slots.to(device), shares.to(device)
    actual = moe.fused_experts(*given, *moved(weights, device), first, "silu", added.to(device)).double().cpu()
    expected = fused_experts(hidden, slots, shares, *weights, first, "silu", added).double()
    assert (actual - expected).norm() < (5e-3 if device.type == "cpu" else 1e-2) * expected.norm()
    exact = hidden.double(), slots, shares, gate_up[first:].double(), down[first:].double()
    full = twin(exact, first, "silu", added.double())
    assert 0.01 * full.norm() < (actual - full).norm() < 0.06 * full.norm()


def moved(weights: tuple[Weight, Weight], device: torch.device) -> tuple[Weight, Weight]:
    gate_up, down = (weight.like(tensor.to(device) for tensor in weight.tensors()) for weight in weights)
    return gate_up, down


def in_blocks(weights: torch.Tensor) -> Weight:
    """[S, N, K] in eight bits, with scales as the kernels take them."""
    pairs = [quantize(weight.float()) for weight in weights]
    return Weight(BLOCKS, torch.stack([values for values, _ in pairs]), torch.stack([pad_scales(s) for _, s in pairs]))


# tokens, experts, top_k, width, inner
FOUR_BITS: list[tuple[int, int, int, int, int]] = [(9, 3, 2, 64, 96), (1, 4, 3, 160, 32), (40, 2, 2, 96, 64)]


@matrix("dtype, sizes", TOLERANCE, FOUR_BITS, hardest=[(torch.float32, FOUR_BITS[1]), (torch.bfloat16, FOUR_BITS[2])])
def test_experts_of_four_bits_equal_the_twin(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    """With biases and the bounded swish, as gpt-oss has them, and every code."""
    tokens, experts, top_k, width, inner = sizes
    hidden, slots, shares, _, _ = case(tokens, experts, top_k, width, inner, dtype, torch.device("cpu"))
    up, down = (as_int4(experts, *shape, seed) for seed, shape in enumerate(((2 * inner, width), (width, inner))))
    biases = random(experts, 2 * inner, dtype=dtype, seed=5), random(experts, width, dtype=dtype, seed=6)
    against_twin(hidden, slots, shares, (up, down), biases, "clamped_swish", device)


def against_twin(
    hidden: Tensor,
    slots: Tensor,
    shares: Tensor,
    weights: tuple[Weight, Weight],
    biases: Pair,
    activation: Activation,
    device: torch.device,
) -> None:
    up, down = biases
    exact = fused_experts(
        hidden.double(), slots, shares.double(), *weights, 0, activation, None, (up.double(), down.double())
    )
    given = hidden.to(device), slots.to(device), shares.to(device)
    biases = up.to(device), down.to(device)
    close(moe.fused_experts(*given, *moved(weights, device), 0, activation, None, biases), exact, hidden.dtype)


def as_int4(experts: int, rows: int, depth: int, seed: int) -> Weight:
    """[S, N, K / 2] random codes and [S, N, K / 32] scales of 2 ** -10 … 2 ** -6."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (experts, rows, depth // 2), generator=generator).byte()
    return Weight(MXFP4, values, torch.randint(117, 122, (experts, rows, depth // 32), generator=generator).byte())


@every_dtype
def test_experts_with_biases_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    hidden, slots, shares, gate_up, down = case(9, 5, 2, 64, 40, dtype, torch.device("cpu"))
    biases = random(5, 80, dtype=dtype, seed=5), random(5, 64, dtype=dtype, seed=6)
    exact = fused_experts(
        hidden.double(),
        slots,
        shares.double(),
        numbers(gate_up.double()),
        numbers(down.double()),
        0,
        "silu",
        None,
        (biases[0].double(), biases[1].double()),
    )
    moved_biases = biases[0].to(device), biases[1].to(device)
    weights = numbers(gate_up.to(device)), numbers(down.to(device))
    given = hidden.to(device), slots.to(device), shares.to(device)
    close(moe.fused_experts(*given, *weights, 0, "silu", None, moved_biases), exact, dtype)


def test_a_rank_adds_only_what_its_own_experts_make(device: torch.device) -> None:
    hidden, slots, shares, gate_up, down = case(9, 6, 3, 32, 32, torch.float32, device)
    whole = twin((hidden, slots, shares, gate_up, down), 0, "silu")
    parts = []
    for first, end in ((0, 2), (2, 6)):
        given = hidden, slots, shares, gate_up[first:end], down[first:end]
        parts.append(ours(given, first, "silu"))
        close(parts[-1], twin(given, first, "silu"))
    close(parts[0] + parts[1], whole)


def test_what_others_made_is_added(device: torch.device) -> None:
    given = case(9, 5, 2, 64, 64, torch.bfloat16, device)
    added = random(9, 64, dtype=torch.bfloat16, seed=8).to(device)
    close(ours(given, 0, "silu", added), twin(given, 0, "silu", added))


def test_no_tokens_are_no_work(device: torch.device) -> None:
    assert ours(case(0, 5, 2, 64, 64, torch.float32, device), 0, "silu").shape == (0, 64)


@pytest.mark.gpu
def test_an_entry_has_the_same_bits_in_whatever_company() -> None:
    """Which the interpreter's products do not have, numpy's."""
    device = torch.device("cuda")
    hidden, slots, shares, gate_up, down = case(40, 3, 2, 64, 32, torch.bfloat16, device)
    together = ours((hidden, slots, shares, gate_up, down), 0, "silu")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled = ours((hidden[order], slots[order], shares[order], gate_up, down), 0, "silu")
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("kind", ["the twin", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("case_name", "num_shared"), [("mixtral", 0), ("deepseek-v2-lite", 2), ("qwen2-moe", 0)])
def test_a_model_gives_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, case_name: str, num_shared: int, kind: str
) -> None:
    """Through the models' seam: the experts' weights in one tensor, the shared ones too where their width allows it."""
    driver = driver_of(monkeypatch, moe if kind == "triton" else experts_twin, str(folder(case_name)))
    assert counts_of_shared(driver) == {num_shared}
    prompt = [5, 17, 3, 99, 42, 8, 71, 150]
    assert driver.generate(driver.admit(prompt), count=4) == [greedy(case_name, prompt, 4)[0]]


@pytest.mark.parametrize("width", [64, 96])
def test_a_shared_expert_with_a_gate_is_cut_into_experts(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    overrides = {"shared_expert_intermediate_size": width}
    given = {"hf_overrides": overrides, "load_format": "dummy"}
    drivers = [driver_of(monkeypatch, fused, str(folder("qwen2-moe")), **given) for fused in (None, experts_twin)]
    assert [counts_of_shared(driver) for driver in drivers] == [{0}, {width // 32}]
    first, second = (driver.generate(driver.admit([5, 17, 3, 99, 42, 8]), count=8) for driver in drivers)
    assert first == second


def counts_of_shared(driver: Driver) -> set[int]:
    assert isinstance(driver.executor, UniprocExecutor)
    return {experts.num_shared for experts in driver.executor._rank.runner._model.experts}


def driver_of(monkeypatch: pytest.MonkeyPatch, kernels: Any, model: str, **given: Any) -> Driver:
    """On a CPU whose linear layers are plain. `kernels`: where the experts' come from, if from anywhere."""
    changes = {"fused_experts": None if kernels is None else kernels.fused_experts}
    if kernels is moe:
        changes["choose_experts"] = OPS.choose_experts
    ops = changed(torch_ops, **changes)
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: ops)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    return Driver(
        UniprocExecutor(ExecutorConfig(model=model, device="cpu", dtype="float32", kv_cache_bytes=2**20, **given))
    )


@pytest.mark.parametrize(("tokens", "expected"), [(1, 5), pytest.param(40, 6, marks=pytest.mark.slow_in_interpreter)])
def test_a_layer_of_experts_is_few_launches(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, tokens: int, expected: int
) -> None:
    """Behind the router's product: the choice, one or two to sort, up, down and the sum; no copies, no fills."""
    spec = MoeSpec(num_experts=30, top_k=14, intermediate_size=32, renormalize=True, scale=2.0)
    launches: list[str] = []
    plain_launch = Kernel._launch

    def counted(self: Kernel, *given: Any, **options: Any) -> Any:
        launches.append(self.name)
        with _disable_current_modes():
            return plain_launch(self, *given, **options)

    monkeypatch.setattr(Kernel, "_launch", counted)
    hidden, _, _, gate_up, down = case(tokens, 32, 2, 64, 32, torch.bfloat16, device)
    logits = random(tokens, 30).to(device)
    with Recorded(launches):
        ids, shares = OPS.choose_experts(logits, None, spec, 2)
        OPS.fused_experts(hidden, ids, shares, numbers(gate_up), numbers(down), 0, "silu")
    assert len(launches) == expected, launches


class Recorded(TorchDispatchMode):
    """Notes each operation of torch that would be a launch."""

    FREE = ("empty", "view", "t", "transpose", "slice", "as_strided", "detach")

    def __init__(self, launches: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        if function.overloadpacket.__name__ not in self.FREE:
            self._launches.append(str(function))
        return function(*given, **(options or {}))
