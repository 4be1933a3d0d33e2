"""A request computes the same bits alone, among others, in chunks, after a prefix hit and after a preemption.

Compared are the log-probabilities of the whole vocabulary at every step, exactly. This is what makes greedy
output reproducible under load; it holds on the CPU, for float32 and bfloat16. There `batch_invariant` asks for what is so
anyway; tests/executor/kernels/test_triton_invariant.py is the same for what it asks of a GPU.
"""

import functools
import random

import pytest

from penstock.executor.protocol import DType, Sampling
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver, Sequence

pytestmark = pytest.mark.usefixtures("two_threads")
BLOCK, COUNT = 8, 20
FULL = Sampling(temperature=0.0, logprobs=-1)
RNG = random.Random(3)
PROMPT = [RNG.randrange(160) for _ in range(61)]
OTHERS = [[RNG.randrange(160) for _ in range(RNG.randint(1, 90))] for _ in range(63)]
CASES = ["llama-wide", "mistral-sliding", "gemma3", "gpt-oss", "gemma4", "deepseek-v3"]
WITH_STATES = [*CASES, "qwen3.5", "granite4-mamba-groups"]

Trace = list[tuple[tuple[int, ...], tuple[float, ...]]]


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> DType:
    name: DType = request.param
    return name


def driver_of(case: str, dtype: DType) -> Driver:
    return Driver(executor_of(case, dtype=dtype, kv_cache_bytes=2**24, max_num_seqs=70))


def trace(driver: Driver, watched: Sequence, *others: Sequence, chunk: int | None = None) -> Trace:
    """Run until the watched request has its tokens; what it saw at each of them."""
    seen: Trace = []
    while len(watched.output) < COUNT:
        result = driver.advance(*others, watched, chunk=chunk)
        if len(others) in result.logprobs:
            found = result.logprobs[len(others)]
            seen.append((found.ids, found.values))
    return seen


def test_what_asks_for_it_changes_nothing_on_a_cpu(dtype: DType) -> None:
    executor = executor_of("llama-wide", dtype=dtype, batch_invariant=True)
    plain = driver_of("llama-wide", dtype)
    assert executor.info.fingerprint == plain.executor.info.fingerprint  # so its blocks are the same, too
    driver = Driver(executor)
    assert trace(driver, driver.admit(PROMPT, FULL)) == trace(plain, plain.admit(PROMPT, FULL))


@functools.cache
def alone(case: str, dtype: DType) -> Trace:
    driver = driver_of(case, dtype)
    return trace(driver, driver.admit(PROMPT, FULL))


@pytest.mark.parametrize("case", WITH_STATES)
def test_in_a_batch_of_64(case: str, dtype: DType) -> None:
    driver = driver_of(case, dtype)
    others = [driver.admit(prompt) for prompt in OTHERS]
    assert trace(driver, driver.admit(PROMPT, FULL), *others) == alone(case, dtype)


@pytest.mark.parametrize("case", WITH_STATES)
@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 32))])
def test_with_the_prompt_in_chunks_beside_others(case: str, dtype: DType, chunk: int) -> None:
    driver = driver_of(case, dtype)
    others = [driver.admit(prompt) for prompt in OTHERS[:5]]
    assert trace(driver, driver.admit(PROMPT, FULL), *others, chunk=chunk) == alone(case, dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cached", [pytest.param(8, marks=pytest.mark.slow), 56])
def test_after_a_prefix_hit(case: str, dtype: DType, cached: int) -> None:
    driver = driver_of(case, dtype)
    owner = driver.admit([*PROMPT[:cached], 1, 2, 3])
    driver.generate(owner, count=5, chunk=13)
    hit = driver.admit(PROMPT, FULL)
    driver.share(owner, hit, cached // BLOCK)
    assert trace(driver, hit, owner) == alone(case, dtype)


@pytest.mark.parametrize("case", WITH_STATES)
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_after_a_preemption(case: str, dtype: DType, after: int) -> None:
    driver = driver_of(case, dtype)
    victim, other = driver.admit(PROMPT, FULL), driver.admit(OTHERS[0])
    driver.generate(victim, count=after)
    driver.readmit(victim, slot=9)
    assert trace(driver, victim, other) == alone(case, dtype)[after:]
