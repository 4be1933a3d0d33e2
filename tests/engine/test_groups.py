"""Layers that keep different things: block tables by group, windows that give back, states with checkpoints."""

import random
from typing import Any

import pytest

from penstock.engine.messages import Submit
from penstock.executor.protocol import GroupInfo
from tests.support.simulation import BLOCK_SIZE, World, random_drafts, random_request, submit

FULL = GroupInfo()
WINDOW = GroupInfo("window", 2 * BLOCK_SIZE + 1)
STATE = GroupInfo("state", pages=3)


def cached(world: World, name: str, tokens: list[int], max_tokens: int = 1) -> int:
    """How many tokens of the prompt are found in the cache."""
    world.submit(submit(name, tokens, max_tokens=max_tokens))
    world.run()
    found = world.outputs[name][0].num_cached_tokens
    assert found is not None
    return found


SHAPES: list[tuple[GroupInfo, ...]] = [
    (WINDOW,),
    (GroupInfo("window", 2),),
    (FULL, WINDOW),
    (FULL, FULL, WINDOW, WINDOW, GroupInfo("window", 5)),
    (FULL, STATE),
    (FULL, GroupInfo("state", pages=1)),
    (FULL, WINDOW, GroupInfo("state", pages=5)),
    (WINDOW, STATE),
]


def storm(seed: int, num_steps: int, has_drafts: bool = False) -> dict[str, int]:
    """A random world under pressure; every finished request must have the tokens that it gets alone."""
    rng = random.Random(seed)
    shape: dict[str, Any] = {"vocab_size": 50, "max_model_len": 64}
    groups = SHAPES[seed % len(SHAPES)]
    if has_drafts:
        groups = tuple(group for group in groups if group.kind != "state")
    chunk = rng.choice([8, 16, 64])
    least = sum(group.most_pages(64, chunk, BLOCK_SIZE) for group in groups) + 1
    world = World(
        num_blocks=least + rng.choice([0, 0, 3, 10, 100]),
        max_in_flight=rng.choice([1, 2, 3]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=chunk,
        drafts=random_drafts(rng) if has_drafts else None,
        groups=groups,
        **shape,
    )
    messages: dict[str, Submit] = {}
    counts = {"steps": 0, "finished": 0, "aborted": 0, "preempted": 0, "hits": 0}
    while counts["steps"] < num_steps or world.scheduler.has_work():
        if counts["steps"] < num_steps and rng.random() < 0.3 and len(world.scheduler.waiting) < 20:
            message = random_request(rng, len(messages), repeats=has_drafts, **shape)
            messages[message.request_id] = message
            world.submit(message)
        if messages and rng.random() < 0.03:
            world.abort(rng.choice(list(messages)[-20:]))
        world.step()
        counts["steps"] += 1
    world.compare(messages, counts, f"seed {seed}")
    stats = world.scheduler.stats()
    assert stats.num_used_blocks == 0
    counts["preempted"], counts["hits"] = stats.num_preemptions, stats.prefix_hits
    counts["accepted"] = stats.accepted_tokens
    return counts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_drafts", [False, True])
def test_random_worlds_of_several_groups_keep_every_invariant_and_every_token(has_drafts: bool) -> None:
    total: dict[str, int] = {}
    for seed in range(24):
        for name, count in storm(seed, 300, has_drafts).items():
            total[name] = total.get(name, 0) + count
    assert total["preempted"] > 50 and total["aborted"] > 50 and total["hits"] > 250 and total["finished"] > 500
    assert total["accepted"] > 100 or not has_drafts


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_random_steps_of_several_groups() -> None:
    assert sum(storm(seed, 2_000, seed % 4 == 3)["steps"] for seed in range(1000, 1500)) >= 1_000_000
