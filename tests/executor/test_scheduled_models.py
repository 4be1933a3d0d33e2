"""Models of every kind under the scheduler: chunked, batched, preempted and cached requests, with drafts and without, get
transformers' tokens. One table of models, pools and drafts."""

import random
from typing import NamedTuple

import pytest

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.drafts import Drafter
from penstock.engine.core.request import Request
from penstock.executor.protocol import GroupInfo, Step
from penstock.executor.ranks import rank
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_inputs import on_device
from tests.executor.test_runner import drafts_of
from tests.support.checkpoints import executor_of
from tests.support.simulation import Simulation, submit
from tests.support.small_models import greedy

COUNT, AMPLE = 24, 300
WAITING = ("olmo3",)  # its requests are admitted only when all pages that they can ever need are free
NUM_GROUPS = {"gemma3": 3, "mistral-sliding": 1, "qwen2-sliding": 3}


class Row(NamedTuple):
    case: str
    num_spare: int  # pages of the pool beside those of the longest request
    drafts: str = ""  # "ngram", or "known": most are right, and some in the middle are not
    is_device: bool = False  # makes its inputs as on a GPU


HARDEST = [
    Row("gemma3", 6),
    Row("gemma3", 6, "ngram"),
    Row("qwen2-sliding", 6, "ngram"),
    Row("minimax-m2", 6),
    *(Row(case, 25) for case in ("qwen3.5", "granite4-mamba")),
    Row("qwen3.5", AMPLE, "known", is_device=True),
    Row("granite4-mamba-groups", AMPLE, "known", is_device=True),
]
OTHERS = [
    Row("qwen2-sliding", 6),
    *(Row("mistral-sliding", 6, drafts) for drafts in ("", "ngram")),
    *(Row(case, 6) for case in ("phi3", "granite4-moe", "glm4-moe", "lfm2", "olmo3", "smollm3", "ministral3")),
    *(Row(case, 6) for case in ("ernie4.5-moe", "glm4", "hunyuan")),
    Row("qwen3-next", 25),
    *(Row(case, AMPLE, "known") for case in ("qwen3-next", "lfm2")),
]


def open_executor(case: str, num_spare: int, max_model_len: int = 80) -> UniprocExecutor:
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": max_model_len}
    info = executor_of(case, **limits).info
    num_blocks = 1 + sum(group.most_pages(80, 12, 4) for group in info.groups) + num_spare
    return executor_of(case, **limits, kv_cache_bytes=num_blocks * info.block_bytes)


def prompts_of(rng: random.Random) -> list[list[int]]:
    shared = [rng.randrange(160) for _ in range(40)]
    return [shared[: rng.choice([8, 21, 36, 40])] + [rng.randrange(160) for _ in range(5)] for _ in range(8)]


@pytest.mark.timeout(600)  # transformers is slow at recurrent layers on a busy machine
@pytest.mark.parametrize("row", [*HARDEST, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)], ids=str)
def test_requests_get_transformers_tokens_whatever_happens_to_their_blocks(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale blocks are NaN to begin with, and then another group's or request's."""
    rng = random.Random(5)
    prompts = prompts_of(rng)
    expected = [greedy(row.case, prompt, COUNT)[0] for prompt in prompts]

    def guess(_drafter: Drafter, request: Request, room: int) -> tuple[int, ...]:
        most = max(0, min(room, request.max_tokens - request.num_outputs - 1))
        number = int(request.message.request_id[1:]) % len(prompts)
        return tuple(drafts_of(expected[number], request.num_outputs, rng)[:most])

    if row.drafts == "known":
        monkeypatch.setattr(Drafter, "_expected", guess)
        monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 3)
    if row.is_device:
        monkeypatch.setattr(rank, "open_inputs", on_device)
    executor = open_executor(row.case, row.num_spare)
    executor._rank.kv.fill_(float("nan"))
    steps: list[Step] = []
    submit_step = executor.submit

    def note(step: Step) -> None:
        steps.append(step)
        submit_step(step)

    monkeypatch.setattr(executor, "submit", note)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4) if row.drafts else None
    simulation = Simulation(
        executor, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, speculative_config=speculation)
    )
    for number, prompt in enumerate([*prompts, *prompts]):  # the second time much of it is cached
        simulation.submit(submit(f"r{number}", prompt, COUNT))
        if row.drafts == "known" and number % 2:  # while requests wait there are no drafts
            simulation.run()
    simulation.run()
    for number, tokens in enumerate([*expected, *expected]):
        assert simulation.tokens(f"r{number}") == tokens, number
    stats = simulation.scheduler.stats()
    assert stats.prefix_hits > 0 and stats.num_used_blocks == 0
    assert stats.num_preemptions > 0 or row.drafts or row.case in WAITING
    if row.drafts == "known":  # states go back behind a wrong draft, and rows compute what was right again
        assert any(part.tokens and part.count == 1 + len(part.tokens) for step in steps for part in step.rows)
        assert stats.accepted_tokens > 5


def test_groups_are_what_the_layers_say() -> None:
    for case, num_groups in NUM_GROUPS.items():
        assert len(open_executor(case, 100).info.groups) == num_groups, case
    assert open_executor("gemma3", 100, max_model_len=9).info.groups == (GroupInfo(),)
