"""Why a prompt was not found in the cache: one case per reason, and what every request reports."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.engine.core.cache_history import MAX_FOLLOWERS
from penstock.engine.messages import Reuse
from tests.engine.test_groups import forget
from tests.support import simulation
from tests.support.refusals import cases
from tests.support.simulation import World, submit

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
