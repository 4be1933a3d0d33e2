"""Adapters beside each other and beside the base, token for token against transformers with the adapter merged by hand."""

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.kernels.cpu_ops import levels
from penstock.executor.protocol import AdapterError, DType, ExecutorError, Sampling
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_batch_invariance import trace
from tests.executor.test_cpu_layers import executor_with
from tests.executor.test_models import executor_of, prompts
from tests.support.adapters import EVERYWHERE, PREFIX, Adapter, check_shared_steps
from tests.support.driver import Driver

COUNT = 12
LLAMA = "llama-wide"
FULL = Sampling(temperature=0.0, logprobs=-1)
# Families by what is special about their projections: joined ones, rotated neighbours, a gate among the queries, latents …
CASES = ["llama", "gemma3", "qwen2-moe", "qwen3.5"]
CASES_SLOW = ["qwen2", "qwen3", "phi3", "glm4", "qwen3-moe", "granite"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


def with_adapters(case: str, **options: Any) -> UniprocExecutor:
    return executor_of(case, enable_lora=True, **options)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES_SLOW)])
def test_requests_with_several_adapters_and_with_none_share_steps(case: str, tmp_path: Path) -> None:
    """Of models with experts attention and, where there are any, shared experts."""
    targets = (*EVERYWHERE, *ATTENTION, "gate_up_proj")
    adapters = [Adapter(case, tmp_path / str(seed), seed, targets, rank=3 + seed) for seed in range(3)]
    check_shared_steps(with_adapters(case), case, adapters, prompts(6, seed=5), COUNT)


@pytest.mark.parametrize("rank", [1, 64, 256])
def test_ranks_up_to_256(rank: int, tmp_path: Path) -> None:
    adapter = Adapter("llama", tmp_path, 3, rank=rank, alpha=2 * rank)
    executor = with_adapters("llama", max_lora_rank=256)
    driver, prompt = Driver(executor), prompts(1)[0]
    key = executor.load_adapter(str(adapter.path)).key
    assert driver.generate(driver.admit(prompt, adapter=key), count=COUNT) == [adapter.tokens(prompt, COUNT)]


def test_scales_of_rslora_and_of_patterns(tmp_path: Path) -> None:
    prompt = prompts(1)[0]
    by_root = Adapter("llama", tmp_path / "root", 3, use_rslora=True)
    patterns: dict[str, Any] = {
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 4},
        "alpha_pattern": {"o_proj": 6.0},
    }
    other = Adapter("llama", tmp_path / "patterns", 4, **patterns)
    executor = with_adapters("llama")
    driver = Driver(executor)
    for adapter in (by_root, other):
        key = executor.load_adapter(str(adapter.path)).key
        assert driver.generate(driver.admit(prompt, adapter=key), count=COUNT) == [adapter.tokens(prompt, COUNT)]
    assert other.scale == 6.0 / 4  # the pattern says what the field says, so nothing else was to come


STORED = list(itertools.product((LLAMA, "gemma3"), (torch.float32, torch.bfloat16), ("float32", "bfloat16")))
HARDEST = [(LLAMA, torch.bfloat16, "float32"), ("gemma3", torch.float32, "bfloat16")]


@pytest.mark.parametrize(
    ("case", "stored", "dtype"),
    [pytest.param(*each, marks=() if each in HARDEST else pytest.mark.slow) for each in STORED],
)
def test_the_same_bits_alone_and_in_a_batch_of_others(
    case: str, stored: torch.dtype, dtype: DType, tmp_path: Path
) -> None:
    """With an adapter, and without one beside those that have one: as without adapters at all."""
    adapters = [Adapter(case, tmp_path / str(seed), seed, rank=5, alpha=5.0, dtype=stored) for seed in range(2)]
    prompt, others = prompts(1, seed=9, low=30, high=30)[0], prompts(9, seed=10)
    plain = Driver(executor_of(case, dtype=dtype))
    base = trace(plain, plain.admit(prompt, FULL))
    for chosen in (None, 0):
        alone, batched = with_adapters(case, dtype=dtype), with_adapters(case, dtype=dtype)
        first = [alone.load_adapter(str(adapter.path)).key for adapter in adapters]
        assert first == [batched.load_adapter(str(adapter.path)).key for adapter in adapters]
        keys, adapter = [*first, None], None if chosen is None else first[chosen]
        single, driver = Driver(alone), Driver(batched)
        seen = trace(single, single.admit(prompt, FULL, adapter=adapter), chunk=7)
        beside = [driver.admit(each, adapter=keys[index % 3]) for index, each in enumerate(others)]
        assert trace(driver, driver.admit(prompt, FULL, adapter=adapter), *beside, chunk=4) == seen
        assert (seen == base) == (chosen is None)


@pytest.mark.skipif(levels()[-1] == "portable", reason="without AVX2 torch multiplies")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (LLAMA, "bfloat16"),
        ("qwen3.5", "float32"),
        pytest.param(LLAMA, "float32", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_all_layers_in_one_call_and_one_by_one_give_the_same_bits(case: str, dtype: DType, tmp_path: Path) -> None:
    adapters = [Adapter(case, tmp_path / str(seed), seed, rank=6) for seed in range(2)]
    traces = []
    for is_joined in (True, False):
        executor = executor_with(case, dtype, is_joined, enable_lora=True)
        driver = Driver(executor)
        keys = [executor.load_adapter(str(adapter.path)).key for adapter in adapters]
        others = [driver.admit(prompt, adapter=keys[1]) for prompt in prompts(3, seed=4)]
        traces.append(trace(driver, driver.admit(prompts(1)[0], FULL, adapter=keys[0]), *others, chunk=5))
    assert traces[0] == traces[1]


def test_an_adapter_is_known_by_its_content(tmp_path: Path) -> None:
    executor = with_adapters("llama")
    first = executor.load_adapter(str(Adapter("llama", tmp_path / "a", 1).path))
    assert executor.load_adapter(str(Adapter("llama", tmp_path / "b", 1).path)) == first
    others = [Adapter("llama", tmp_path / "c", 2), Adapter("llama", tmp_path / "d", 1, alpha=7.0)]
    others.append(Adapter("llama", tmp_path / "e", 1, ("q_proj",)))
    keys = {first.key, *(executor.load_adapter(str(other.path)).key for other in others)}
    assert len(keys) == 4 and first.rank == 4 and first.num_bytes > 0


def test_no_more_are_held_than_there_is_room_for(tmp_path: Path) -> None:
    executor = with_adapters("llama", max_cpu_loras=2)
    paths = [str(Adapter("llama", tmp_path / str(seed), seed).path) for seed in range(3)]
    keys = [executor.load_adapter(path).key for path in paths[:2]]
    with pytest.raises(AdapterError, match="max_cpu_loras: 2 adapters are held already; unload one"):
        executor.load_adapter(paths[2])
    executor.unload_adapter(keys[0])
    executor.load_adapter(paths[2])


@pytest.mark.parametrize("case", ["opt", "gemma4"])
def test_models_that_take_none_say_so(case: str) -> None:
    with pytest.raises(ExecutorError, match="enable_lora: given; adapters of .* are not computed here"):
        with_adapters(case)


def config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(held)
        save_file({name: tensor.clone() for name, tensor in held.items()}, path)

    return rewrite


Q = f"{PREFIX}model.layers.1.self_attn.q_proj"
DOWN, UP = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def rename(old: str, new: str) -> Callable[[Path], None]:
    return tensors(lambda held: held.update({new: held.pop(old)}))


def set_to(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return tensors(lambda held: held.update({name: tensor}))


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another method": (config(peft_type="IA3"), "peft_type: 'IA3' found; 'LORA' is expected"),
    "DoRA": (config(use_dora=True), "use_dora: True found"),
    "biases": (config(bias="all"), "bias: 'all' found; 'none' is expected"),
    "biases of B": (config(lora_bias=True), "lora_bias: True found"),
    "whole modules": (config(modules_to_save=["lm_head"]), r"modules_to_save: \['lm_head'\] found"),
    "parameters": (config(target_parameters=["experts.gate_up_proj"]), r"target_parameters: .* found"),
    "another base": (config(init_lora_weights="pissa"), "init_lora_weights: 'pissa' found"),
    "a field of tomorrow": (config(use_xlora=True), "use_xlora: True found; no field but"),
    "a pattern that takes for ever": (config(rank_pattern={"(a+)+$": 4}), "rank_pattern: .* is expected"),
    "no rank": (config(r=0), "r: 0 found; an integer from 1"),
    "a rank that is not the tensors'": (config(r=5), "A of shape .* says that the rank is 5"),
    "an alpha that is no number": (config(lora_alpha="big"), "lora_alpha: 'big' found"),
    "too large a rank": (config(r=2**20), "says that the rank is 1048576"),
    "a module that the model lacks": (
        tensors(lambda held: held.update({name.replace("layers.1", "layers.9"): held[name] for name in (DOWN, UP)})),
        "'model.layers.9.self_attn.q_proj': no projection of this model that adapters can change here",
    ),
    "experts": (
        tensors(lambda held: held.update({n.replace("self_attn.q", "mlp.experts.0.up"): held[n] for n in (DOWN, UP)})),
        "'model.layers.1.mlp.experts.0.up_proj': no projection",
    ),
    "an embedding": (rename(DOWN, f"{PREFIX}model.embed_tokens.lora_embedding_A"), "only lora_A.weight and lora_B"),
    "a magnitude": (rename(DOWN, f"{Q}.lora_magnitude_vector"), "lora_magnitude_vector': only lora_A"),
    "A alone": (tensors(lambda held: held.pop(UP)), "'model.layers.1.self_attn.q_proj' has no lora_B.weight"),
    "other inputs": (
        set_to(DOWN, torch.zeros(4, 60)),
        "the adapter is for 60 inputs and 64 outputs; the model's q_proj",
    ),
    "other outputs": (
        set_to(UP, torch.zeros(68, 4)),
        "the adapter is for 64 inputs and 68 outputs; the model's q_proj",
    ),
    "the same tensor twice": (
        tensors(lambda held: held.update({DOWN.replace(".model.model.", ".model."): held[DOWN] + 1})),
        "are of one module; one of them is expected",
    ),
    "integers": (set_to(UP, torch.zeros(64, 4, dtype=torch.int32)), "lora_B.weight' is I32 .*; a matrix of F32"),
    "a vector": (set_to(UP, torch.zeros(64)), "a matrix of F32, BF16, F16 is expected"),
    "NaN": (set_to(UP, torch.full((64, 4), float("nan"))), "lora_B.weight' has numbers that are not finite"),
    "infinity": (set_to(DOWN, torch.full((4, 64), float("inf"))), "lora_A.weight' has numbers that are not finite"),
    "nothing": (tensors(lambda held: held.clear()), "no tensors; an adapter without any changes nothing"),
    "half a file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),  # type: ignore
        "not a whole safetensors file",
    ),
    "a pickle": (
        lambda folder: os.rename(folder / "adapter_model.safetensors", folder / "adapter_model.bin"),
        "adapter_model.bin is a pickle, which is never read",
    ),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "No such file"),
}


@pytest.fixture(scope="module")
def loaded() -> UniprocExecutor:
    return with_adapters("llama")


@pytest.mark.parametrize("lie", LIES)
def test_a_folder_that_lies_is_refused_by_name_and_nothing_changes(
    lie: str, loaded: UniprocExecutor, tmp_path: Path
) -> None:
    change, message = LIES[lie]
    folder = Adapter("llama", tmp_path, random.Random(lie).randrange(100)).path
    change(folder)
    store = loaded._rank.adapters
    before = dict(store._held)
    with pytest.raises(AdapterError, match=message):
        loaded.load_adapter(str(folder))
    assert store._held == before


def test_a_path_that_the_system_refuses_is_refused_by_name(
    loaded: UniprocExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match="/xxx.*: File name too long"):
        loaded.load_adapter("/tmp/" + "x" * 300)
    with pytest.raises(AdapterError, match="null byte"):
        loaded.load_adapter("/tmp/\0")
    path = Adapter("llama", tmp_path, 3).path

    def is_file(_path: Path) -> bool:  # root may enter any folder
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(AdapterError, match=f"{path}: Permission denied"):
        loaded.load_adapter(str(path))


def test_a_rank_above_the_limit_is_refused(loaded: UniprocExecutor, tmp_path: Path) -> None:
    path = Adapter("llama", tmp_path, 1, rank=17).path
    with pytest.raises(AdapterError, match="has rank 17; max_lora_rank is 16"):
        loaded.load_adapter(str(path))
