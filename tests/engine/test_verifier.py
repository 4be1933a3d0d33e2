"""Kept blocks that are computed again: a wrong byte in any tier is found, the answer is right, and so is the next one.

Over the oracle executor, whose tokens are hashes of all the KV that a request reads."""

import random
from collections import Counter
from typing import Any

import pytest

from penstock.executor.protocol import Step
from tests.engine.test_tiers import PROMPT, cached, churn
from tests.support.flaky_store import FlakyStore
from tests.support.simulation import World, alone, random_drafts, random_request, submit


def world_of(**options: Any) -> World:
    return World(**{"num_blocks": 17, "host_slots": 200, "verify_blocks": 1} | options)


def flip(array: Any) -> None:
    array[...] = array ^ 1


def counts(world: World, tier: str) -> tuple[float, float]:
    found = world.scheduler.stats().tiers[tier]
    return found["verified_blocks"], found["differing_blocks"]


def paths(world: World) -> list[str]:
    return [difference.path for difference in world.scheduler.differences]


def host_blocks(world: World) -> list[int]:
    """Of the prompt's chain, in order."""
    keys = prompt_keys(world)
    return [block for key in keys if (block := world.tiers.index.host.find(key))]


def prompt_keys(world: World) -> list[bytes]:
    message = submit("keys", PROMPT, max_tokens=1)
    world.submit(message)
    keys = list(world.scheduler.requests["keys"].keys)
    world.abort("keys")
    return keys


def arena(world: World) -> Any:
    transfers = world.executor._transfers
    assert transfers is not None
    return transfers._arena


@pytest.mark.parametrize("in_flight", [1, 2])
def test_blocks_that_are_right_are_compared_and_used(in_flight: int) -> None:
    world = world_of(max_in_flight=in_flight)
    assert cached(world, "cold") == 0
    for number in range(4):
        world.scheduler.pool.drop(world.scheduler.pool.cached_keys())
        assert cached(world, f"warm{number}") == 19
    assert counts(world, "host") == (4, 0) and not world.scheduler.differences
    assert world.scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("place", range(5))
def test_a_flipped_byte_in_the_host_is_found_and_the_answers_are_right(place: int, in_flight: int) -> None:
    """Whichever block is drawn: those behind the wrong one are computed from it."""
    world = world_of(max_in_flight=in_flight)
    cached(world, "cold")
    churn(world)
    flip(arena(world)[host_blocks(world)[place]])
    while not world.scheduler.differences:  # a block before it was drawn, and nothing was wrong there
        world.scheduler.pool.drop(world.scheduler.pool.cached_keys())
        world.submit(submit(f"probe{len(world.outputs)}", PROMPT, max_tokens=1))
        world.settle()
    assert paths(world) == ["host"] and counts(world, "host")[1] == 1
    assert not set(prompt_keys(world)) & set(world.tiers.index._offers)
    assert cached(world, "after") == 19, "what was computed instead"
    churn(world)
    assert cached(world, "later") == 19 and len(world.scheduler.differences) == 1


def test_the_request_that_finds_it_gets_what_is_computed() -> None:
    world = world_of()
    cached(world, "cold")
    churn(world)
    for block in host_blocks(world):
        flip(arena(world)[block])
    assert cached(world, "warm") == 0
    assert paths(world) == ["host"]


def test_a_wrong_byte_that_the_disk_gives_as_good_is_found_and_leaves_the_disk() -> None:
    store = FlakyStore()
    world = world_of(host_slots=20, store=store)
    cached(world, "cold")
    churn(world)
    keys = prompt_keys(world)
    for key in keys:
        store.data[key] = bytes(byte ^ 1 for byte in store.data[key])
    bad = {key: store.data[key] for key in keys}
    assert cached(world, "warm") == 0
    assert paths(world) == ["disk"] and counts(world, "disk") == (1, 1)
    assert not any(store.data.get(key) == bad[key] for key in keys)
    churn(world)
    assert cached(world, "after") == 19 and len(world.scheduler.differences) == 1


def test_what_an_earlier_life_left_and_has_not_been_asked_for_goes_with_it() -> None:
    """It may go on from the wrong block: the disk has no more than its key."""
    store = FlakyStore()
    world = world_of(host_slots=40, store=store, max_model_len=96)
    cached(world, "cold")
    longer = [*PROMPT, *range(20, 40)]
    world.submit(submit("longer", longer, max_tokens=1))
    world.settle()
    world.executor.close()
    data = {key: bytes(byte ^ 1 for byte in value) for key, value in store.data.items()}
    world = world_of(host_slots=40, store=FlakyStore(data=data), max_model_len=96)
    world.settle()
    assert len(world.disk.data) == 10
    assert cached(world, "warm") == 0
    world.settle()
    world.submit(submit("again", longer, max_tokens=3))
    world.settle()
    assert world.tokens("again") == alone(submit("again", longer, max_tokens=3), max_model_len=96)[0]
    assert world.outputs["again"][0].num_cached_tokens == 20


@pytest.mark.parametrize("tiers", [0, 50])
def test_a_wrong_byte_in_a_block_of_the_device_is_found_now_and_then(tiers: int) -> None:
    world = world_of(num_blocks=60, host_slots=tiers)
    cached(world, "cold")
    block = world.scheduler.pool.find(prompt_keys(world)[0])
    flip(world.executor._kv[block])
    for number in range(400):
        world.submit(submit(f"r{number}", PROMPT, max_tokens=1))
        world.settle()
        if world.scheduler.differences:
            break
    assert paths(world) == ["device"] and counts(world, "device")[1] == 1
    assert cached(world, "after") == 19


def test_others_that_began_with_the_wrong_block_go_on_from_right_ones() -> None:
    """They share the device's block: what they say from then on is computed from their tokens alone."""
    world = world_of(num_blocks=60)
    cached(world, "cold")
    world.scheduler.pool.drop(world.scheduler.pool.cached_keys())
    for block in host_blocks(world):
        flip(arena(world)[block])
    for name in "abc":
        world.submit(submit(name, PROMPT, max_tokens=12))
    world.settle()
    assert len(world.scheduler.differences) >= 1
    for name in "abc":
        assert world.tokens(name) == alone(submit(name, PROMPT, max_tokens=12))[0]


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_moment_of_a_comparison_leaks_nothing(steps: int) -> None:
    world = world_of()
    cached(world, "cold")
    churn(world)
    for block in host_blocks(world):
        flip(arena(world)[block])
    world.submit(submit("goes", PROMPT, max_tokens=3))
    for _ in range(steps):
        if world.scheduler.has_work():
            world.step()
    world.abort("goes")
    world.settle()
    assert world.scheduler.stats().num_used_blocks == 0
    assert cached(world, "after") in (0, 19)


def test_drops_reach_the_ranks_once() -> None:
    world = world_of(host_slots=20, store=FlakyStore())
    cached(world, "cold")
    churn(world)
    for key in prompt_keys(world):
        world.disk.data[key] = bytes(len(world.disk.data[key]))
    seen: list[Step] = []
    submit_step = world.executor.submit

    def see(step: Step) -> None:
        seen.append(step)
        submit_step(step)

    world.executor.submit = see  # type: ignore[method-assign]
    assert cached(world, "warm") == 0
    drops = [step.transfers.drops for step in seen if step.transfers is not None and step.transfers.drops]
    assert len(drops) == 1 and set(prompt_keys(world)) <= set(drops[0])


def test_in_storms_every_answer_is_right_while_much_that_is_taken_is_compared() -> None:
    found: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(seed)
        store = FlakyStore(seed=seed, delay=3, refuses=0.1, fails_put=0.1, fails_load=0.1, misses=0.1)
        world = World(
            num_blocks=rng.choice([18, 25, 40]),
            max_in_flight=rng.choice([1, 2]),
            host_slots=rng.choice([0, 20, 60]),
            store=store if seed % 2 else None,
            max_num_batched_tokens=rng.choice([8, 16]),
            max_num_seqs=rng.choice([2, 8]),
            drafts=random_drafts(rng) if seed % 3 == 0 else None,
            verify_blocks=1,
        )
        found.update(world.storm(rng, 300, f"seed {seed}", 50, 64))
        for name, tier in world.scheduler.stats().tiers.items():
            found[name] += int(tier.get("verified_blocks", 0))
        assert not world.scheduler.differences
    assert found["finished"] > 300 and found["preempted"] > 10
    assert min(found["device"], found["host"], found["disk"]) > 3, found


def test_in_a_storm_with_flips_of_what_the_host_keeps_no_block_is_lost() -> None:
    num_found = 0
    for seed in range(8):
        rng = random.Random(seed)
        world = world_of(num_blocks=25, host_slots=40)
        for number in range(60):
            world.submit(random_request(rng, number, 50, 64))
            world.step()
            flip(arena(world)[rng.randrange(1, 41)])
        world.settle()
        assert world.scheduler.stats().num_used_blocks == 0
        num_found += len(world.scheduler.differences)
    assert num_found > 3
