"""Checkpoints of AWQ, GPTQ and compressed-tensors against transformers on the numbers that their codes stand for: as codes
and widened on a CPU, and where the seam of a GPU's kernels is there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.executor.kernels import torch_ops
from penstock.executor.kernels.codes import is_computed
from penstock.executor.kernels.grouped import Grouped
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks.multiproc import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_models import prompts
from tests.support.driver import Driver
from tests.support.packed_models import CASES, WEIGHTS, folders, greedy
from tests.support.twins import changed
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins import grouped as grouped_twin

COUNT = 12
CPU = torch.device("cpu")
needs_codes = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")


def config_of(path: Path, **options: Any) -> ExecutorConfig:
    given = {"kv_cache_bytes": 2**22, "block_size": 8, "max_num_seqs": 16, **options}
    return ExecutorConfig(model=str(path), **given)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the twins for kernels."""
    ops = changed(torch_ops, groups=grouped_twin, blocks=eight_bits_twin)
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: ops)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)


def generate(executor: Any, given: list[list[int]]) -> list[list[int]]:
    driver = Driver(executor)
    sequences = []
    for prompt in given:
        sequences.append(driver.admit(prompt))
        driver.advance(*sequences, chunk=7)
    return driver.generate(*sequences, count=COUNT, chunk=7)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_the_numbers_that_were_packed(name: str) -> None:
    narrow, full = folders(name)
    checkpoint, numbers = open_checkpoint(narrow), load_file(full / WEIGHTS)
    packed = 0
    for weight, expected in numbers.items():
        assert checkpoint.shape(weight) == expected.shape
        part = checkpoint.read(weight)
        if isinstance(part, Grouped):
            packed += 1
            assert torch.equal(part.numbers(CPU, torch.float32), expected)
            assert torch.equal(part.narrow(0, 3, 40).numbers(CPU, torch.bfloat16), expected[3:43].bfloat16())  # type: ignore[union-attr]
            assert (part.below is None) is (CASES[name].is_symmetric)
            assert (part.order is None) is (not CASES[name].is_ordered)
        else:
            assert isinstance(part, torch.Tensor) and torch.equal(part.float(), expected)
    assert packed >= 14


@needs_codes
@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_tokens_are_those_of_the_numbers(name: str) -> None:
    given = prompts(3, seed=3)
    executor = UniprocExecutor(config_of(folders(name)[0], **({"dtype": "float32"} if "floats" in name else {})))
    assert executor.info.dtype == "float32"
    memory = executor.info.memory
    if "floats" in name:
        assert "weights as codes" not in memory and memory["FP8 weights as float32"] > 0
    elif name == "gptq-v2":  # scales of 32 bits that no 16 are
        assert "weights as codes" not in memory and memory["codes as float32"] > 0
    else:
        assert memory["weights as codes"] > 0 and "codes as float32" not in memory
    assert generate(executor, given) == [greedy(name, prompt, COUNT) for prompt in given]


@pytest.mark.parametrize("name", CASES)
def test_where_a_gpu_computes_tokens_are_those_of_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    given = prompts(3, seed=3)
    executor = UniprocExecutor(config_of(folders(name)[0], dtype="float32"))
    memory = executor.info.memory
    assert all(experts.is_fused for experts in executor._rank._loaded.model.experts)
    assert memory["weights as codes"] > 0 and not {"codes as float32", "FP8 weights as float32"} & memory.keys()
    assert generate(executor, given) == [greedy(name, prompt, COUNT) for prompt in given]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "by_experts", "options"),
    [("awq-32", False, {}), ("gptq-ordered", False, {}), ("packed-8", False, {}), ("packed-experts", True, {})],
)
def test_ranks_cut_and_give_the_same_tokens(name: str, by_experts: bool, options: dict[str, Any]) -> None:
    given = prompts(3, seed=3)
    config = config_of(folders(name)[0], tensor_parallel_size=2, enable_expert_parallel=by_experts, **options)
    executor = open_multiproc(config)
    try:
        # Inputs that are out of order are cut as numbers.
        assert not is_computed() or ("codes as float32" in executor.info.memory) is CASES[name].is_ordered
        got = generate(executor, given)
    finally:
        executor.close()
    assert got == [greedy(name, prompt, COUNT) for prompt in given]
