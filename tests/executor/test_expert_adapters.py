"""Adapters of experts, in both ways that PEFT writes them, token for token against transformers with them merged by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.executor.protocol import AdapterError, DType, EplbConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_adapters import FULL, config, tensors, with_adapters
from tests.executor.test_adapters_ranks import Pair
from tests.executor.test_batch_invariance import trace
from tests.executor.test_graphs import Recorder
from tests.executor.test_models import executor_of, prompts
from tests.executor.test_multiproc import config_of
from tests.executor.test_rank_graphs import WORLD
from tests.support.adapters import PREFIX, check_shared_steps
from tests.support.driver import Driver
from tests.support.expert_adapters import ExpertAdapter

COUNT = 10
CASES = ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "granite-moe"]  # those have shared experts in the middle


@pytest.mark.parametrize(
    ("case", "is_stacked"),
    [*((case, kind) for case in CASES for kind in (False, True)), ("gpt-oss", True), ("qwen3.5-moe", True)],
)
def test_requests_with_other_experts_share_steps(case: str, is_stacked: bool, tmp_path: Path) -> None:
    """Two that change experts, one that does not, and none, in the same steps; then one alone."""
    adapters = [ExpertAdapter(case, tmp_path / str(seed), seed, is_stacked) for seed in range(2)]
    adapters.append(ExpertAdapter(case, tmp_path / "2", 2, False, only=()))
    check_shared_steps(with_adapters(case), case, adapters, prompts(6, seed=5), COUNT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored as float32", "stored as bfloat16"])
def test_the_same_bits_alone_and_in_a_batch_of_others(stored: torch.dtype, dtype: DType, tmp_path: Path) -> None:
    """With an adapter, and without one beside those that have one: as without adapters at all."""
    case = "qwen2-moe"
    paths = [str(ExpertAdapter(case, tmp_path / str(s), s, bool(s), dtype=stored).path) for s in range(2)]
    prompt, others = prompts(1, seed=9, low=30, high=30)[0], prompts(9, seed=10)
    plain = Driver(executor_of(case, dtype=dtype))
    base = trace(plain, plain.admit(prompt, FULL))
    for chosen in (None, 0, 1):
        alone, batched = with_adapters(case, dtype=dtype), with_adapters(case, dtype=dtype)
        first = [alone.load_adapter(path).key for path in paths]
        assert first == [batched.load_adapter(path).key for path in paths]
        keys, adapter = [*first, None], None if chosen is None else first[chosen]
        single, driver = Driver(alone), Driver(batched)
        seen = trace(single, single.admit(prompt, FULL, adapter=adapter), chunk=7)
        beside = [driver.admit(each, adapter=keys[index % 3]) for index, each in enumerate(others)]
        assert trace(driver, driver.admit(prompt, FULL, adapter=adapter), *beside, chunk=4) == seen
        assert (seen == base) == (chosen is None)


@pytest.mark.parametrize(
    ("case", "is_stacked", "by_experts"),
    [
        ("qwen2-moe", True, False),
        ("mixtral", False, False),
        ("mixtral", True, True),  # five experts: one of them on both ranks
        ("deepseek-v3", False, True),
        ("gpt-oss", True, False),
    ],
)
def test_two_ranks_compute_them_together(case: str, is_stacked: bool, by_experts: bool, tmp_path: Path) -> None:
    adapters = [ExpertAdapter(case, tmp_path / str(seed), seed, is_stacked) for seed in range(2)]
    given = config_of(case, WORLD, enable_lora=True, enable_expert_parallel=by_experts)
    executor = Pair(given, [Recorder() for _ in range(WORLD)])
    try:
        check_shared_steps(executor, case, adapters, prompts(3, seed=5), COUNT)
    finally:
        executor.close()


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize(
    ("case", "only"), [("qwen3-moe", "gate_up_proj"), ("mixtral", "gate_up_proj"), ("gpt-oss", "down_proj")]
)
def test_versions_of_peft_that_took_inputs_for_outputs(case: str, only: str, version: str, tmp_path: Path) -> None:
    """Where shapes do not tell (64 inputs, 64 outputs) the version does; and one parameter alone is wrapped once."""
    adapter = ExpertAdapter(case, tmp_path, 1, True, only=(only,), version=version)
    executor = with_adapters(case)
    driver, prompt = Driver(executor), prompts(1)[0]
    key = executor.load_adapter(str(adapter.path)).key
    assert driver.generate(driver.admit(prompt, adapter=key), count=COUNT) == [adapter.tokens(prompt, COUNT)]


EXPERTS = f"{PREFIX}model.layers.1.mlp.experts"
ROUTER = f"{PREFIX}model.layers.1.mlp.gate"
Change = Callable[[dict[str, Tensor]], object]


def change(edit: Change, **fields: Any) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        tensors(edit)(folder)
        config(**fields)(folder)

    return both


def keep(held: dict[str, Tensor], *beginnings: str) -> None:
    for name in [name for name in held if not name.startswith(beginnings)]:
        del held[name]


def move(held: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    for name in [name for name in held if name.startswith(f"{old}.lora_")]:
        held[name.replace(old, new)] = held.pop(name)
    return held


def cut(name: str, dim: int, size: int) -> Change:
    return lambda held: held.update({name: held[name].narrow(dim, 0, size)})


LIES: dict[str, tuple[bool, Callable[[Path], None], str]] = {
    "an expert too many": (
        False,
        change(lambda held: move(held, f"{EXPERTS}.5.up_proj", f"{EXPERTS}.6.up_proj")),
        r"'model.layers.1.mlp.experts.6.up_proj': no projection",
    ),
    "an expert's number in other words": (
        False,
        change(lambda held: move(held, f"{EXPERTS}.5.up_proj", f"{EXPERTS}.05.up_proj")),
        r"'model.layers.1.mlp.experts.05.up_proj': no projection",
    ),
    "other inputs of an expert": (
        False,
        change(cut(f"{EXPERTS}.2.down_proj.lora_A.weight", 1, 31)),
        r"experts.2.down_proj: the adapter is for 31 inputs and 64 outputs; the model's down_proj has 32 and 64",
    ),
    "the router": (False, change(lambda held: move(held, f"{EXPERTS}.0.up_proj", ROUTER)), "layers.1.mlp.gate': no projection"),
    "too few experts": (
        True,
        change(lambda held: [cut(f"{EXPERTS}.lora_{f}.weight", "AB".index(f), 15)(held) for f in "AB"]),
        r"experts.down_proj: the adapter is for 5 experts with 32 inputs and 64 outputs; the model's 6 have 32 and 64",
    ),
    "half an expert": (
        True,
        change(lambda held: [cut(f"{EXPERTS}.lora_{f}.weight", "AB".index(f), 16)(held) for f in "AB"]),
        r"'model.layers.1.mlp.experts.down_proj': A of shape \[16, 32\] and B of shape \[64, 16\] found; .* rank is 3",
    ),
    "A and B of other experts": (True, change(cut(f"{EXPERTS}.lora_A.weight", 0, 15)), r"A of shape \[15, 32\] and B of"),
    "other inputs of a stack": (True, change(cut(f"{EXPERTS}.lora_A.weight", 1, 31)), "6 experts with 31 inputs and 64 out"),
    "a wrapper too few": (
        True,
        change(lambda held: keep(held, f"{EXPERTS}.base_layer")),
        r"\['model.layers.1.mlp.experts.base_layer'\] are wrapped; by target_parameters in .* it should be \['model.lay",
    ),
    "parameters that have no tensors": (
        True,
        change(lambda _: None, target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"]),
        "no tensors for 'gate.weight', which is among target_parameters; of these gate_up_proj and down_proj of experts",
    ),
    "a stack that no parameter is named for": (
        True,
        change(lambda _: None, target_parameters=None),
        r"'model.layers.1.mlp.experts.base_layer': A of shape \[18, 64\] and B of shape \[64, 18\] found; .* rank is 3",
    ),
    "a stack of no layer": (
        True,
        change(lambda held: [move(held, f"{EXPERTS}{end}", f"{EXPERTS.replace('.1.', '.9.')}{end}") for end in ("", ".base_layer")]),
        "'model.layers.9.mlp.experts.down_proj' and 1 more: no projection",
    ),
    "a stack and modules beside": (
        True,
        change(lambda held: held.update({f"{EXPERTS}.0.up_proj.lora_{f}.weight": torch.zeros(s) for f, s in (("A", (3, 64)), ("B", (32, 3)))})),
        "'model.layers.1.mlp.experts.0.up_proj': no projection",
    ),
    "a version that is none": (True, config(peft_version="new"), "peft_version: 'new' is no version"),
    "a rank above the limit": (True, change(lambda _: None, r=18, rank_pattern={}), "has rank 18; max_lora_rank is 16"),
    "infinity": (
        True,
        change(lambda held: held[f"{EXPERTS}.lora_A.weight"].fill_(float("inf"))),
        "experts.lora_A.weight' has numbers that are not finite",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> UniprocExecutor:
    return with_adapters("qwen3-moe")


@pytest.mark.parametrize("lie", LIES)
def test_a_folder_that_lies_is_refused_by_name_and_nothing_changes(
    lie: str, loaded: UniprocExecutor, tmp_path: Path
) -> None:
    is_stacked, edit, message = LIES[lie]
    folder = ExpertAdapter("qwen3-moe", tmp_path, 1, is_stacked, ()).path
    edit(folder)
    before = dict(loaded._rank.adapters._held)
    with pytest.raises(AdapterError, match=message):
        loaded.load_adapter(str(folder))
    assert loaded._rank.adapters._held == before


def test_what_peft_makes_of_projections_that_transformers_joined(tmp_path: Path) -> None:
    """`target_modules` of gate and up become a stack of twice the rank, said by a pattern that begins like one of regular
    expressions."""
    adapter = ExpertAdapter("qwen3-moe", tmp_path, 1, True, (), rank=6, alpha=10.0)
    config(
        r=3, lora_alpha=5.0, rank_pattern={r".*\.gate_up_proj": 6, r".*\.down_proj": 6},
        alpha_pattern={r".*\.gate_up_proj": 10.0, r".*\.down_proj": 10.0}, target_parameters=["down_proj", "gate_up_proj"],
    )(adapter.path)  # fmt: skip
    executor = with_adapters("qwen3-moe")
    driver, prompt = Driver(executor), prompts(1)[0]
    info = executor.load_adapter(str(adapter.path))
    assert info.rank == 6
    assert driver.generate(driver.admit(prompt, adapter=info.key), count=COUNT) == [adapter.tokens(prompt, COUNT)]


def test_experts_may_be_left_out(tmp_path: Path) -> None:
    executor = with_adapters("qwen2-moe", lora_experts=False)
    before = executor._rank.adapters._held
    with pytest.raises(AdapterError, match="experts.down_proj' and .* no projection of this model that adapters can"):
        executor.load_adapter(str(ExpertAdapter("qwen2-moe", tmp_path / "experts", 1, True, ()).path))
    adapter = ExpertAdapter("qwen2-moe", tmp_path / "other", 1, True, ("q_proj",), only=())
    driver, prompt, key = Driver(executor), prompts(1)[0], executor.load_adapter(str(adapter.path)).key
    assert driver.generate(driver.admit(prompt, adapter=key), count=COUNT) == [adapter.tokens(prompt, COUNT)]
    assert list(before) == [key]


def test_experts_that_change_places_take_none(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": EplbConfig()}
    executor = Pair(config_of("qwen3-moe", WORLD, enable_lora=True, **options), [Recorder() for _ in range(WORLD)])
    try:
        with pytest.raises(
            AdapterError, match="experts.down_proj' and .* no projection of this model that adapters can"
        ):
            executor.load_adapter(str(ExpertAdapter("qwen3-moe", tmp_path, 1, True, ()).path))
        path = ExpertAdapter("qwen3-moe", tmp_path / "other", 1, True, ("q_proj",), only=()).path
        assert executor.load_adapter(str(path)).rank == 3
    finally:
        executor.close()
