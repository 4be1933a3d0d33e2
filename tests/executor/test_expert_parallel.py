"""Models with experts over several ranks, sharing out slices of every expert, or whole experts."""

import pytest

from penstock.executor.multiproc import open_multiproc
from tests.executor.driver import Driver
from tests.executor.small_models import greedy
from tests.executor.test_models import prompts
from tests.executor.test_multiproc import config_of


@pytest.mark.parametrize(
    ("case", "ranks", "by_experts"),
    [
        ("mixtral", 2, True),  # five experts: two and three
        ("qwen2-moe", 2, False),
        ("qwen3-moe", 4, True),
        ("deepseek-v2-yarn", 2, True),
        ("deepseek-v3", 4, False),
    ],
)
def test_ranks_together_give_the_tokens_of_one(case: str, ranks: int, by_experts: bool) -> None:
    given = prompts(4, seed=3)
    executor = open_multiproc(config_of(case, ranks, enable_expert_parallel=by_experts))
    try:
        driver = Driver(executor)
        sequences = []
        for prompt in given:
            sequences.append(driver.admit(prompt))
            driver.advance(*sequences, chunk=5)
        got = driver.generate(*sequences, count=12, chunk=5)
    finally:
        executor.close()
    assert got == [greedy(case, prompt, 12)[0] for prompt in given]
