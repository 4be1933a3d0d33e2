"""Layers that keep different things: block tables by group, windows that give back, states with checkpoints."""

import pytest

from penstock.cache.keys import block_keys, namespace_root, page_key
from penstock.executor.protocol import GroupInfo, Sampling
from tests.support.flaky_store import FlakyStore
from tests.support.refusals import cases
from tests.support.simulation import BLOCK_SIZE, World, submit

FULL = GroupInfo()
WINDOW = GroupInfo("window", 2 * BLOCK_SIZE + 1)
STATE = GroupInfo("state", pages=3)


def test_blocks_that_no_window_sees_any_more_are_given_back() -> None:
    """A window of 9 positions touches three blocks of four, and a row of 8 positions two more. The pool has just the pages
    of 60 positions: 15, and three for each window. A row waits for blocks that saves still hold: a request that skips the
    cache, if it was preempted for them, would come to the same place again."""
    world = World(groups=(FULL, WINDOW, WINDOW), num_blocks=22, max_num_batched_tokens=8, num_host_blocks=16)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0)
    world.submit(submit("a", list(range(40)), max_tokens=20, sampling=sampling))
    most = 0
    while world.scheduler.has_work():
        world.step()
        for request in world.scheduler.running:
            held = [sum(map(bool, table)) for table in request.kv.tables]
            most = max(most, *held[1:])
            assert held[0] == len(request.kv.blocks) and held[1] == held[2] and not request.num_preemptions
    assert most == 4 < WINDOW.most_pages(60, 8, BLOCK_SIZE), "one fewer, as rows begin where blocks do"


def test_a_block_that_is_given_back_too_early_is_noticed() -> None:
    """The window of the twelfth token begins with the last position of the first block."""
    world = World(groups=(WINDOW,), max_in_flight=1)
    world.submit(submit("a", list(range(11))))
    world.step()
    (request,) = world.scheduler.running
    request.kv.tables[0][0] = 0
    with pytest.raises(AssertionError, match="still seen was given back"):
        world.scheduler.check()


@pytest.mark.parametrize(("groups", "fit"), [((FULL, WINDOW, WINDOW, WINDOW), True), ((FULL,) * 4, False)])
def test_as_many_requests_run_at_once_as_their_windows_allow(groups: tuple[GroupInfo, ...], fit: bool) -> None:
    """62 positions are 16 blocks, of which a window of 9 positions touches 3; a prompt of 30 positions touches 8, all at
    once. An eighth of the pool is kept for those that run: of 450 pages, 56. So 14 requests run to their end with
    16 + 3 * 3 pages each, with 4 * 16 pages no more than 7 do."""
    world = World(num_blocks=451, groups=groups, max_num_batched_tokens=64, max_num_seqs=14, max_in_flight=1)
    for number in range(14):
        world.submit(submit(f"r{number}", [number] * 30, max_tokens=33))
    most = 0
    while world.scheduler.has_work():
        world.step(check=False)
        most = max(most, len(world.scheduler.running))
    assert (world.scheduler.stats().num_preemptions == 0) is fit
    assert most == 14 or not fit


def test_a_hit_needs_the_blocks_within_the_window_alone() -> None:
    prompt = list(range(33))
    world = World(groups=(FULL, WINDOW), num_blocks=60)
    assert world.cached("a", prompt) == 0
    assert world.cached("b", prompt) == 32
    forget(world, prompt, [0, 1, 2, 3, 4], group=1)  # all that a prefix of 8 blocks does not need
    assert world.cached("c", prompt) == 32
    forget(world, prompt, [6], group=1)  # one that it does
    assert world.cached("d", prompt) == 0, "no shorter prefix has its window either"
    assert world.cached("e", prompt) == 32, "it was computed again"


def test_a_prefix_is_found_up_to_the_last_checkpoint_and_computed_from_there() -> None:
    """Three pages a state, one group of attention: a checkpoint at every third block, and at the prompt's last one."""
    world = World(groups=(FULL, STATE), max_num_batched_tokens=64)
    for name, prompt, num_cached in cases(__file__, "prompts with checkpoints"):
        assert world.cached(name, [*prompt]) == num_cached, name


@pytest.mark.parametrize(("device", "counts"), [("cpu", [12, 12, 12, 12, 2]), ("cuda", [24, 24, 2])])
def test_on_a_gpu_rows_end_for_checkpoints_no_more_often_than_steps_are_full(device: str, counts: list[int]) -> None:
    world = World(groups=(FULL, STATE), max_num_batched_tokens=24, max_in_flight=1, options={"device": device})
    world.submit(submit("a", list(range(50)), max_tokens=1))
    assert [world.run_step().rows[0].count for _ in counts] == counts and not world.scheduler.has_work()


def test_a_state_is_never_written_where_others_read_it() -> None:
    """Requests that begin with one checkpoint, side by side."""
    world = World(groups=(FULL, STATE), max_num_batched_tokens=64, max_in_flight=1)
    prompt = list(range(13))
    world.cached("a", prompt)
    for name in "bcd":
        world.submit(submit(name, [*prompt, ord(name) % 50], max_tokens=9))
    step = world.plan()
    assert len({row.states_in for row in step.rows}) == 1 and len({row.states_out for row in step.rows}) == 3
    assert not set(step.rows[0].states_in) & {page for row in step.rows for page in row.states_out}


def test_a_state_stays_in_place_and_is_sent_once() -> None:
    world = World(groups=(FULL, STATE), max_in_flight=1)
    world.submit(submit("a", [1, 2, 3], max_tokens=30))
    changes = 0
    while world.scheduler.has_work():
        (request,) = world.scheduler.requests.values()
        before = request.kv.sent_state
        world.step()
        changes += bool(request.kv.state) and request.kv.sent_state != before
    # Beginning; then at each checkpoint (12 and 24) the next row writes elsewhere, and the one after reads there.
    assert changes <= 5


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE), (WINDOW,)])
def test_all_groups_come_back_from_the_host_and_an_earlier_engines_disk(groups: tuple[GroupInfo, ...]) -> None:
    prompt, store = list(range(21)), FlakyStore()
    world = World(num_blocks=40, num_host_blocks=400, store=store, groups=groups)
    assert world.cached("cold", prompt) == 0
    world.churn()
    # The store gives up a used chain from its end. What has left a window is not used, and goes before.
    last = page_key(key_of(world, submit("", prompt).tokens, 4, group=0), 1, STATE.pages - 1)
    assert WINDOW in groups or next(iter(store.data)) == last
    assert not world.scheduler.pool.find(key_of(world, submit("", prompt).tokens, 0, group=0))
    assert world.cached("from the host", prompt) == 20
    assert world.cached("from the device", prompt) == 20
    assert world.scheduler.stats().tiers["host"]["hit_tokens"] == 20
    world.settle()
    world.executor.close()
    world = World(num_blocks=40, num_host_blocks=400, store=FlakyStore(data=store.data), groups=groups)
    world.settle()
    assert world.cached("from the disk", prompt) == 20
    assert world.scheduler.stats().tiers["disk"]["hit_tokens"] == 20
    world.executor.close()


def test_a_state_that_the_device_has_ages_no_faster_than_its_blocks() -> None:
    world = World(num_host_blocks=400, store=(store := FlakyStore()), groups=(FULL, STATE))
    prompts = {"first": [*range(21)], "other": [40] * 21, "again": [*range(21)], "next": [50] * 9}
    for name, prompt in prompts.items():  # what the last one stores takes along which keys were used
        world.cached(name, prompt)
    first, other = (key_of(world, submit("", prompts[name]).tokens, 4, group=0) for name in ("first", "other"))
    assert [*store.data].index(page_key(first, 1)) > [*store.data].index(other)


def key_of(world: World, tokens: bytes, block: int, group: int) -> bytes:
    keys = block_keys(tokens, BLOCK_SIZE, root=namespace_root(model=world.executor.info.fingerprint))
    return page_key(keys[block], group) if group else keys[block]


def forget(world: World, prompt: list[int], blocks: list[int], group: int) -> None:
    """Hand these blocks out, and take them back without their content."""
    pool, tokens = world.scheduler.pool, submit("", prompt).tokens
    for block in blocks:
        place = pool.find(key_of(world, tokens, block, group))
        pool.hold((place,))
        pool._index.pop(pool._keys[place] or b"")
        pool._keys[place] = None
        pool.release((place,))


SHAPES: list[tuple[GroupInfo, ...]] = cases(__file__, "groups of layers", **globals())
