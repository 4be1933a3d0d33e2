"""All layers of a decoder without experts in one call: the same bits as one call after the other, whatever the layers have."""

from collections.abc import Iterator

import pytest
import torch

from penstock.executor.kernels.cpu_ops import levels
from penstock.executor.models.decoder import Decoder
from penstock.executor.protocol import DType
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import executor_of, prompts
from tests.support.driver import Driver
from tests.support.refusals import hardest

pytestmark = pytest.mark.skipif(levels()[-1] == "portable", reason="without AVX2 torch multiplies")
CASES = ["llama", "llama-one-layer", "qwen2", "qwen3", "gemma3", "mistral-sliding", "llama-tied-biases", "qwen3.5"]


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Collect the results of the decoders in this test, step by step."""
    seen: list[torch.Tensor] = []
    forward = Decoder.forward

    def spy(self: Decoder, *arguments: object) -> torch.Tensor:
        seen.append(forward(self, *arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(Decoder, "forward", spy)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN until they are written
    yield seen
    torch.use_deterministic_algorithms(False)


def executor_with(case: str, dtype: DType, is_joined: bool) -> UniprocExecutor:
    """Open a model that computes all its layers in one call, or each by itself."""
    executor = executor_of(case, dtype=dtype)
    model = executor._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is not None
    if not is_joined:
        model._joined = None
    return executor


def run(case: str, dtype: DType, is_joined: bool) -> None:
    driver = Driver(executor_with(case, dtype, is_joined))
    running = []
    for prompt in prompts(4, seed=3):
        running.append(driver.admit(prompt))
        driver.advance(*reversed(running), chunk=7)
    driver.generate(*running, count=10, chunk=7)


@pytest.mark.parametrize("dtype", hardest(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("case", CASES)
def test_one_call_gives_the_bits_of_many(case: str, dtype: DType, hidden: list[torch.Tensor]) -> None:
    run(case, dtype, is_joined=True)
    joined = [*hidden]
    hidden.clear()
    run(case, dtype, is_joined=False)
    assert len(joined) == len(hidden) > 10
    assert all(torch.equal(one, many) for one, many in zip(joined, hidden, strict=True))


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v2-lite", "qwen3-next", "granite4-mamba-groups", "lfm2"])
def test_what_that_call_does_not_have_goes_layer_by_layer(case: str) -> None:
    model = executor_of(case)._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is None
