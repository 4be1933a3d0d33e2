"""Models with windows under the scheduler: chunked, batched, preempted and cached requests get transformers' tokens."""

import random

import pytest

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Output
from penstock.executor.protocol import ExecutorConfig, GroupInfo
from penstock.executor.uniproc import UniprocExecutor
from tests.support.simulation import submit
from tests.support.small_models import folder, greedy

CASES = {"gemma3": 3, "mistral-sliding": 1, "qwen2-sliding": 3}
BLOCK, COUNT = 4, 24


def open_executor(case: str, num_spare: int, **options: object) -> UniprocExecutor:
    """Its pool holds the longest request, and `num_spare` pages."""
    given = {"model": str(folder(case)), "dtype": "float32", "device": "cpu", "block_size": BLOCK, "max_num_seqs": 4}
    given |= {"kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 12, "max_model_len": 80} | options
    info = UniprocExecutor(ExecutorConfig(**given)).info  # type: ignore[arg-type]
    num_blocks = 1 + sum(group.most_pages(80, 12, BLOCK) for group in info.groups) + num_spare
    given["kv_cache_bytes"] = num_blocks * info.block_bytes
    return UniprocExecutor(ExecutorConfig(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [None, SpeculativeConfig(method="ngram", num_speculative_tokens=4)])
@pytest.mark.parametrize("case", CASES)
def test_requests_get_transformers_tokens_whatever_happens_to_their_blocks(
    case: str, drafts: SpeculativeConfig | None
) -> None:
    """Stale blocks are NaN to begin with, and then another group's or request's."""
    executor = open_executor(case, 6)
    groups = executor.info.groups
    assert any(group.kind == "window" for group in groups)
    executor._rank.kv.fill_(float("nan"))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, speculative_config=drafts),
        executor.info,
        lambda: 0.0,
    )
    rng = random.Random(5)
    shared = [rng.randrange(160) for _ in range(40)]
    prompts = [shared[: rng.choice([8, 21, 36, 40])] + [rng.randrange(160) for _ in range(5)] for _ in range(8)]
    outputs: dict[str, list[Output]] = {f"r{number}": [] for number in range(2 * len(prompts))}
    for number, prompt in enumerate([*prompts, *prompts]):  # the second time much of it is cached
        assert scheduler.submit(submit(f"r{number}", prompt, COUNT)) is None
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.check()
        assert step is not None
        executor.submit(step)
        for output in scheduler.apply(executor.collect()):
            outputs[output.request_id].append(output)
        scheduler.check()
    for number, prompt in enumerate([*prompts, *prompts]):
        got = [token for output in outputs[f"r{number}"] for token in output.tokens]
        assert got == greedy(case, prompt, COUNT)[0], number
    stats = scheduler.stats()
    assert (stats.num_preemptions > 0 or drafts is not None) and stats.prefix_hits > 0 and stats.num_used_blocks == 0


def test_groups_are_what_the_layers_say() -> None:
    for case, num_groups in CASES.items():
        assert len(open_executor(case, 100).info.groups) == num_groups, case
    assert open_executor("gemma3", 100, max_model_len=9).info.groups == (GroupInfo(),)
