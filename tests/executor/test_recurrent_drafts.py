"""Models with recurrent layers and drafts under the scheduler: right and wrong ones, in any batch, change no token."""

import random

import pytest

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.drafts import Drafter
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.executor.ranks import rank
from tests.executor.test_grouped_models import open_executor
from tests.executor.test_inputs import on_device
from tests.executor.test_runner import drafts_of
from tests.support.simulation import submit
from tests.support.small_models import greedy

COUNT = 14


@pytest.mark.timeout(600)  # transformers is slow at these on a busy machine
@pytest.mark.parametrize(
    ("case", "is_device"), [("qwen3-next", False), ("qwen3.5", True), ("lfm2", False), ("granite4-mamba-groups", True)]
)
def test_requests_with_drafts_get_transformers_tokens(
    case: str, is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes is known here, so most drafts are right, and some in the middle are not. Stale pages are NaN to begin with."""
    rng = random.Random(5)
    prompts = [[rng.randrange(160) for _ in range(length)] for length in (5, 12)]
    expected = [greedy(case, prompt, COUNT)[0] for prompt in prompts]

    def guess(_drafter: Drafter, request: Request, room: int) -> tuple[int, ...]:
        most = max(0, min(room, request.max_tokens - request.num_outputs - 1))
        number = int(request.message.request_id[1:]) % len(prompts)
        return tuple(drafts_of(expected[number], request.num_outputs, rng)[:most])

    monkeypatch.setattr(Drafter, "_expected", guess)
    monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 3)
    if is_device:
        monkeypatch.setattr(rank, "open_inputs", on_device)
    executor = open_executor(case, 300)
    executor._rank.kv.fill_(float("nan"))
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=12, speculative_config=SpeculativeConfig(method="ngram")
    )
    scheduler = Scheduler(config, executor.info, lambda: 0.0)
    tokens: dict[str, list[int]] = {}
    num_again = 0
    for first in (0, len(prompts)):  # the second time much of it is cached
        for number, prompt in enumerate(prompts, first):
            assert scheduler.submit(submit(f"r{number}", prompt, COUNT)) is None
        while scheduler.has_work():
            step = scheduler.schedule()
            scheduler.check()
            assert step is not None
            num_again += sum(row.tokens != () and row.count == 1 + len(row.tokens) for row in step.rows)
            executor.submit(step)
            for output in scheduler.apply(executor.collect()):
                tokens.setdefault(output.request_id, []).extend(output.tokens)
            scheduler.check()
    assert [tokens[f"r{number}"] for number in range(2 * len(prompts))] == [*expected, *expected]
    stats = scheduler.stats()
    assert num_again > 0 and stats.accepted_tokens > 5 and stats.prefix_hits > 0 and stats.num_used_blocks == 0
