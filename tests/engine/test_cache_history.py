"""Why a prompt was not found in the cache: one case per reason, and what every request reports."""

from typing import Any

import msgspec
import pytest

from penstock.engine.core.cache_history import MAX_FOLLOWERS
from penstock.engine.messages import Reuse
from penstock.executor.protocol import GroupInfo, Sampling
from tests.engine.test_groups import forget
from tests.support.flaky_store import FlakyStore
from tests.support.refusals import cases
from tests.support.simulation import BLOCK_SIZE, World, submit

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


def test_after_a_reset_blocks_are_gone_without_a_time() -> None:
    world = World()
    reuse(world, "a")
    assert world.scheduler.reset_prefix_cache()
    assert reuse(world, "b") == Reuse({"device": 0}, "evicted")


def test_another_salt_or_adapter_or_other_weights_are_the_reason() -> None:
    world = World()
    reuse(world, "a")
    assert reuse(world, "b", cache_salt="s").reason == "other_salt"
    assert reuse(world, "c", cache_salt="s").reason == "partial_block"
    assert reuse(world, "d", cache_salt="s", adapter="x").reason == "other_adapter"
    world.scheduler.change_model(msgspec.structs.replace(world.executor.info, fingerprint=b"other"), 1)
    assert reuse(world, "e", cache_salt="s", adapter="x").reason == "weights_changed"


def test_blocks_that_are_read_too_late_have_timed_out() -> None:
    world = World(num_blocks=17, num_host_blocks=20, store=FlakyStore())
    reuse(world, "a")
    world.churn()
    world.disk.is_stalled = True
    assert reuse(world, "late") == Reuse({"device": 0}, "tier_timeout")


def test_a_state_has_no_checkpoint_where_prompts_diverge() -> None:
    world = World(groups=(GroupInfo(), GroupInfo("state", pages=3)), num_blocks=200)
    reuse(world, "a", list(range(40)))
    assert reuse(world, "b", [*range(22), 99, 98, 97]).reason == "no_checkpoint"


def test_the_blocks_of_a_window_have_been_evicted() -> None:
    world = World(groups=(GroupInfo(), GroupInfo("window", 2 * BLOCK_SIZE + 1)), num_blocks=60)
    prompt = list(range(33))
    reuse(world, "a", prompt)
    forget(world, prompt, [6], group=1)
    assert reuse(world, "b", prompt).reason == "evicted"


def test_the_cache_is_disabled_for_a_request_that_computes_its_whole_prompt() -> None:
    world = World()
    reuse(world, "a")
    found = reuse(world, "b", sampling=Sampling(temperature=0.0, prompt_logprobs=1))
    assert found == Reuse({"device": 0}, "cache_disabled")
