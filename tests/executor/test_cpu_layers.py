"""All layers of a decoder without experts in one call: the same bits as one call after the other, whatever the layers have."""

from collections.abc import Iterator

import pytest
import torch

from penstock.executor.kernels.cpu_ops import levels
from penstock.executor.models.decoder import Decoder
from penstock.executor.protocol import DType
from tests.support.checkpoints import executor_of, prompts
from tests.support.driver import Driver
from tests.support.refusals import hardest

pytestmark = pytest.mark.skipif(levels()[-1] == "portable", reason="without AVX2 torch multiplies")
CASES = ["llama", "llama-one-layer", "qwen2", "qwen3", "gemma3", "mistral-sliding", "llama-tied-biases", "qwen3.5"]


@pytest.fixture
def filled() -> Iterator[None]:
    """Fill new tensors with NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case: str, dtype: DType, is_joined: bool) -> None:
    """Run a model that computes all its layers in one call, or each by itself."""
    executor = executor_of(case, dtype=dtype)
    model = executor._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is not None
    if not is_joined:
        model._joined = None
    driver, running = Driver(executor), []
    for prompt in prompts(4, seed=3):
        running.append(driver.admit(prompt))
        driver.advance(*reversed(running), chunk=7)
    driver.generate(*running, count=10, chunk=7)


@pytest.mark.parametrize("dtype", hardest(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("filled")
def test_one_call_gives_the_bits_of_many(case: str, dtype: DType, recorded: list[torch.Tensor]) -> None:
    for is_joined in (True, False):
        run(case, dtype, is_joined)
    steps = len(recorded) // 2
    assert steps > 10 and len(recorded) == 2 * steps
    assert all(torch.equal(one, many) for one, many in zip(recorded[:steps], recorded[steps:], strict=True))


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v2-lite", "qwen3-next", "granite4-mamba-groups", "lfm2"])
def test_what_that_call_does_not_have_goes_layer_by_layer(case: str) -> None:
    model = executor_of(case)._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is None
