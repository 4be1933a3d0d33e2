"""Adapters over two ranks: each has its rows or columns of them, and either all hold one or none."""

from pathlib import Path

import pytest

from penstock.executor.protocol import AdapterError
from tests.support.adapters import Adapter, check_shared_steps
from tests.support.checkpoints import config_of, prompts, running
from tests.support.driver import Driver
from tests.support.refusals import hardest

COUNT = 8


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("case", hardest(["llama", "glm4", "phi3", "qwen3-moe"], "phi3", "qwen3-moe"))
def test_two_ranks_compute_adapters_together(case: str, tmp_path: Path) -> None:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "down_proj", "gate_up_proj", "up_proj")
    adapters = [Adapter(case, tmp_path / str(seed), seed, targets[: 5 if "moe" in case else 8]) for seed in range(2)]
    with running(config_of(case, 2, enable_lora=True)) as executor:
        check_shared_steps(executor, case, adapters, prompts(3, seed=5), COUNT)


@pytest.mark.usefixtures("forked_ranks")
def test_processes_load_and_unload_together_or_not_at_all(tmp_path: Path) -> None:
    adapters = [Adapter("llama", tmp_path / str(seed), seed) for seed in range(4)]
    with running(config_of("llama", 2, enable_lora=True, max_cpu_loras=2, max_loras=2)) as executor:
        keys = [executor.load_adapter(str(adapter.path)).key for adapter in adapters[:2]]
        with pytest.raises(AdapterError, match="max_cpu_loras: 2 adapters are held already"):
            executor.load_adapter(str(adapters[2].path))
        driver, prompt = Driver(executor), prompts(1, seed=5)[0]
        one = driver.admit(prompt, adapter=keys[1])
        assert driver.generate(one, count=COUNT, chunk=7) == [adapters[1].tokens(prompt, COUNT)]
        executor.unload_adapter(keys[0])
        again = driver.admit(prompt, adapter=executor.load_adapter(str(adapters[3].path)).key)
        assert driver.generate(again, count=COUNT) == [adapters[3].tokens(prompt, COUNT)]
