"""The model that is served when none is named, from its real GGUF file, if the wheel is installed."""

from typing import Any

import pytest

from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.support.default_file import default_file
from tests.support.driver import Driver

pytestmark = pytest.mark.usefixtures("two_threads")

THE_CAPITAL_OF_FRANCE_IS, PARIS = [504, 3575, 282, 4649, 314], 7042


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(UniprocExecutor(ExecutorConfig(model=str(default_file()), kv_cache_bytes=2**27, max_model_len=512)))


def test_it_knows_the_capital_of_france(driver: Driver) -> None:
    assert driver.executor.info.architecture == "LlamaForCausalLM"
    assert driver.generate(driver.admit(THE_CAPITAL_OF_FRANCE_IS), count=1) == [[PARIS]]


def test_it_says_the_same_alone_and_in_a_batch_in_its_own_dtype(driver: Driver) -> None:
    alone = driver.generate(driver.admit(THE_CAPITAL_OF_FRANCE_IS), count=24)
    crowd = [driver.admit([*range(100 + i, 130 + i), *THE_CAPITAL_OF_FRANCE_IS][-5 - 3 * i :]) for i in range(8)]
    assert driver.generate(*crowd, count=24, chunk=11)[:1] == alone


@pytest.mark.slow
def test_three_ranks_say_what_one_says() -> None:
    """Nine heads, three of keys and values: three each. In float32, where no near tie is decided by rounding."""
    asked: dict[str, Any] = {"kv_cache_bytes": 2**26, "max_model_len": 256, "dtype": "float32", "max_num_seqs": 4}
    prompt = [*range(100, 130), *THE_CAPITAL_OF_FRANCE_IS]
    alone = Driver(UniprocExecutor(ExecutorConfig(model=str(default_file()), **asked)))
    expected = alone.generate(alone.admit(prompt), count=8, chunk=20)
    together = open_multiproc(ExecutorConfig(model=str(default_file()), tensor_parallel_size=3, **asked))
    try:
        driver = Driver(together)
        assert driver.generate(driver.admit(prompt), count=8, chunk=20) == expected
    finally:
        together.close()
