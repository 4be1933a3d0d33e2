"""The reports of the core on its cache: exactly the blocks that its pool holds, and why a prompt was not found, one case per reason."""

import random
from array import array
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import msgspec
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.core.cache_history import MAX_FOLLOWERS
from penstock.engine.core.engine_core import CacheLog
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.request import Request, RequestKv
from penstock.engine.core.usable import UsableKeys
from penstock.engine.messages import CacheUpdate, Reuse, Submit
from penstock.executor.protocol import GroupInfo, ModelInfo
from tests.engine.test_groups import SHAPES, forget
from tests.support import simulation
from tests.support.refusals import cases, hardest
from tests.support.simulation import BLOCK_SIZE, World, random_request, submit


def apply(reported: set[bytes], updates: list[CacheUpdate], tier: str = "device") -> None:
    for each in updates:
        if each.tier != tier:
            continue
        stored, removed = ({run[at : at + 8] for at in range(0, len(run), 8)} for run in (each.stored, each.removed))
        assert not stored & removed
        if each.is_snapshot:
            reported.clear()
        reported -= removed
        reported |= stored


def promised(message: Submit, reported: set[bytes], info: ModelInfo) -> tuple[Request, int]:
    """Return the request, and how many blocks of its prompt a router takes to be cached.

    One more token is appended, so that all blocks can be hits."""
    root = namespace_root(model=info.fingerprint, adapter=message.adapter, salt=message.cache_salt)
    tokens = array("i", message.tokens + bytes(4))
    request = Request(message, 0, 0.0, tokens, 1, RequestKv(root, skips_cache=False))
    request.kv.keys = block_keys(memoryview(tokens), BLOCK_SIZE, root=root)
    is_cached = [key[:8] in reported for key in request.kv.keys]
    if info.hits_at_ends:
        return request, max((index + 1 for index, each in enumerate(is_cached) if each), default=0)
    return request, len(list(takewhile(bool, is_cached)))


@pytest.mark.parametrize("num_host_blocks", hardest([0, 200], 200))
@pytest.mark.parametrize("groups", hardest(SHAPES[2:], SHAPES[6]))
def test_reported_blocks_of_several_groups_can_be_hit(groups: tuple[GroupInfo, ...], num_host_blocks: int) -> None:
    """Whatever a router knows of a tier, a request finds at least as much in it and those above; with states alone, all."""
    num_promised = num_found = 0
    for seed in range(2):
        rng = random.Random(seed)
        least = sum(group.most_pages(64, 16, BLOCK_SIZE) for group in groups)
        world = World(num_blocks=least + 30, groups=groups, num_host_blocks=num_host_blocks)
        own = world.scheduler.kv
        pools, find, tier = {"device": world.scheduler.pool}, world.scheduler.pool.find, "device"
        if num_host_blocks:
            pools["host"], find, tier = world.tiers.index.host, world.tiers.page_of, "host"
        log = CacheLog({name: UsableKeys(pool, own) for name, pool in pools.items()}, own.keys)
        reported: set[bytes] = set()
        prompts = []
        for number in range(50):
            if number == 10:
                log.watch(True)
            message = random_request(rng, number, 50, 64)
            prompts.append(message)
            world.submit(message)
            for _ in range(rng.randint(0, 4)):
                world.step()
            if number < 10:
                continue
            apply(reported, log.updates(), tier)
            for message in prompts[-8:]:
                request, count = promised(message, reported, world.executor.info)
                found = own.keys.find(request, find).num_blocks
                assert count <= found
                num_promised += count
                num_found += found
        log.watch(False)
        assert not own.listeners and all(pool._changes is None for pool in pools.values())
        world.run()
        world.executor.close()
    has_both = groups[-1].pages and any(group.kind == "window" for group in groups)
    assert has_both or num_promised > (0.7 * num_found if world.executor.info.hits_at_ends else 0)


def test_contents_of_blocks_are_reported_no_later_than_their_keys() -> None:
    world = World()
    log = CacheLog({"device": world.scheduler.pool}, world.scheduler.kv.keys)
    log.watch(True, with_blocks=True)
    tokens = list(range(2 * BLOCK_SIZE + 1))
    for name in ("first", "again"):
        world.submit(submit(name, tokens, max_tokens=1, cache_salt="s"))
    assert [update.is_snapshot for update in log.updates()] == [True]
    world.run()
    (update,) = log.updates()
    assert [block.key for block in update.blocks[:2]] == [update.stored[:8], update.stored[8:]]
    first, second, *again = update.blocks
    assert (first.parent, first.salt, second.parent, second.salt, again) == (b"", "s", first.key, None, [first, second])
    assert first.tokens + second.tokens == array("i", tokens[: 2 * BLOCK_SIZE]).tobytes()
    world.submit(submit("cached", tokens, max_tokens=1, cache_salt="s"))
    world.run()
    assert log.updates() == [CacheUpdate("device", b"", b"", blocks=again)], "a hit leaves nothing behind"
    log.watch(False)
    assert world.scheduler.kv.keys.on_keys is None


def test_a_block_that_came_and_went_between_two_updates_is_not_reported() -> None:
    pool = BlockPool(2)
    log = CacheLog({"device": pool}, PageKeys((GroupInfo(),), 16, makes_keys=True))
    log.watch(True)
    log.updates()
    pool.register(pool.allocate(1)[0], b"a" * 32)
    pool.release([1])
    pool.allocate(1)
    assert log.updates() == []
    pool.register(1, b"b" * 32)
    assert log.updates() == [CacheUpdate("device", b"b" * 8, b"")]
    pool.release([1])
    pool.allocate(1)
    pool.register(1, b"b" * 32)
    assert log.updates() == [], "it is cached as before"


PROMPT = list(range(20))  # five blocks


def reuse(world: World, name: str, prompt: list[int] = PROMPT, **options: Any) -> Reuse:
    """Run a request and return what it took from the cache."""
    world.submit(submit(name, prompt, **{"max_tokens": 1, **options}))
    world.run()
    first = world.outputs[name][0]
    assert first.reuse is not None
    return first.reuse


def test_only_a_partial_block_is_missing_where_all_full_ones_are_cached() -> None:
    world = World()
    reuse(world, "a", [*PROMPT, 7])
    assert reuse(world, "b", [*PROMPT, 7, 8]) == Reuse({"device": 20}, "partial_block")
    assert reuse(world, "c") == Reuse({"device": 19}, "partial_block"), "the last token is always computed"
    assert reuse(world, "d", [7, 8]) == Reuse({"device": 0}, "partial_block")


@pytest.mark.parametrize(("prompt", "num_cached", "differs_at"), cases(__file__, "other prompts", PROMPT=PROMPT))
def test_a_prompt_that_differs_names_its_first_new_token(prompt: list[int], num_cached: int, differs_at: int) -> None:
    world = World()
    assert reuse(world, "a") == Reuse({"device": 0}, "new_tokens", differs_at=0)
    assert reuse(world, "b", prompt) == Reuse({"device": num_cached}, "new_tokens", differs_at=differs_at)


def test_of_several_earlier_continuations_the_longest_shared_one_counts() -> None:
    world = World()
    for token in range(90, 90 + MAX_FOLLOWERS):
        reuse(world, f"r{token}", [*PROMPT[:4], *[1, 2, token - 80, token]])
    assert reuse(world, "b", [*PROMPT[:4], 1, 2, 10, 99]).differs_at == 7


def test_blocks_evicted_from_the_device_say_so() -> None:
    world = World(num_blocks=17)
    reuse(world, "a")
    world.churn()
    found = reuse(world, "b")
    assert (found.reason, found.evicted_from, found.cached) == ("evicted", "device", {"device": 0})
    assert found.evicted_s_ago is not None and found.evicted_s_ago >= 0


def test_blocks_evicted_from_the_host_say_so_and_those_found_there_are_counted() -> None:
    world = World(num_blocks=17, num_host_blocks=20)
    reuse(world, "a")
    world.settle()
    world.churn(3)
    found = reuse(world, "b")
    assert found.reason == "partial_block" and found.cached["host"] > 0
    world.settle()
    world.churn()
    assert reuse(world, "c").evicted_from == "host"


def test_another_salt_or_adapter_or_other_weights_are_the_reason() -> None:
    world = World()
    reuse(world, "a")
    assert reuse(world, "b", cache_salt="s").reason == "other_salt"
    assert reuse(world, "c", cache_salt="s").reason == "partial_block"
    assert reuse(world, "d", cache_salt="s", adapter="x").reason == "other_adapter"
    world.scheduler.change_model(msgspec.structs.replace(world.executor.info, fingerprint=b"other"), 1)
    assert reuse(world, "e", cache_salt="s", adapter="x").reason == "weights_changed"


def stall(world: World) -> None:
    """Let the blocks be on the disk alone, which does not answer."""
    world.churn()
    world.disk.is_stalled = True


NAMES = {**vars(simulation), "PROMPT": PROMPT, "Reuse": Reuse, "forget": forget, "stall": stall}


@pytest.mark.parametrize(
    ("expected", "options", "first", "change", "second", "fields"), cases(__file__, "reasons for a miss", **NAMES)
)
def test_each_kind_of_miss_has_its_reason(
    expected: Reuse, options: Any, first: list[int], change: Callable[[World], object], second: list[int], fields: Any
) -> None:
    """A prompt is computed, something changes, and a second prompt does not find all of it."""
    world = World(**options)
    reuse(world, "first", first)
    change(world)
    assert reuse(world, "second", second, **fields) == expected
