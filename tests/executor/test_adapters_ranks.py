"""Adapters over two ranks: each has its rows or columns of them, and either all hold one or none."""

from pathlib import Path

import pytest

from penstock.executor.protocol import AdapterError
from penstock.executor.ranks.multiproc import open_multiproc
from tests.executor.test_models import prompts
from tests.executor.test_multiproc import config_of
from tests.support.adapters import Adapter
from tests.support.driver import Driver
from tests.support.small_models import greedy

COUNT = 8


@pytest.mark.parametrize("case", ["llama", "glm4"])
def test_two_ranks_compute_adapters_together(case: str, tmp_path: Path) -> None:
    adapters = [Adapter(case, tmp_path / str(seed), seed) for seed in range(2)]
    executor = open_multiproc(config_of(case, 2, enable_lora=True, max_cpu_loras=2, max_loras=2))
    try:
        keys = [executor.load_adapter(str(adapter.path)).key for adapter in adapters]
        with pytest.raises(AdapterError, match="max_cpu_loras: 2 adapters are held already"):
            executor.load_adapter(str(Adapter(case, tmp_path / "2", 2).path))
        driver, given = Driver(executor), prompts(3, seed=5)
        running = [driver.admit(prompt, adapter=key) for prompt, key in zip(given, [*keys, None], strict=True)]
        got = driver.generate(*running, count=COUNT, chunk=7)
        assert got[:2] == [adapter.tokens(prompt, COUNT) for adapter, prompt in zip(adapters, given, strict=False)]
        assert got[2] == greedy(case, given[2], COUNT)[0]
        executor.unload_adapter(keys[0])
        third = Adapter(case, tmp_path / "3", 3)
        again = driver.admit(given[0], adapter=executor.load_adapter(str(third.path)).key)
        assert driver.generate(again, count=COUNT) == [third.tokens(given[0], COUNT)]
    finally:
        executor.close()
