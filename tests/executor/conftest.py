from collections.abc import Iterator

import pytest
import torch

import penstock.executor  # noqa: F401 - before torch: it sets how torch's threads wait
from penstock.executor.step.runner import ModelRunner
from tests.support.fork_server import forking
from tests.support.pretended_gpu import PretendedGpu


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as gpu:
        yield gpu


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch and our CPU kernels share the work of one operation between two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of `open_multiproc` instead of starting them: for tests of their answers, not of their lives."""
    starting = forking("penstock.executor.ranks.worker", "tests.support.oracle_core")
    monkeypatch.setattr("penstock.executor.process_life.subprocess", starting)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Collect the logits of every step of the executors in this test, [S, vocabulary] each."""
    seen: list[torch.Tensor] = []
    original = ModelRunner.__init__

    def spy(self: ModelRunner, model, *rest) -> None:  # type: ignore[no-untyped-def]
        compute = model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(compute(hidden))
            return seen[-1]

        model.logits = logits
        original(self, model, *rest)

    monkeypatch.setattr(ModelRunner, "__init__", spy)
    yield seen
