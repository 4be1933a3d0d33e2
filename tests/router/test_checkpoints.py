"""Replicas whose layers keep states: the router predicts a prompt's last checkpoint, and never one that is not cached."""

import random
from array import array

from penstock.engine.core.engine_core import CacheLog
from penstock.engine.core.request import Request, RequestKv
from penstock.engine.core.usable import UsableKeys
from penstock.engine.http.kv_stream import Alive, Changes, Hello, Snapshot
from penstock.executor.protocol import GroupInfo
from penstock.router.placement.load import PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo
from tests.router.test_placement import Clock, cached, ids, short_keys
from tests.support.simulation import BLOCK_SIZE, World, random_request

GROUPS = (GroupInfo(), GroupInfo(), GroupInfo("state", pages=4))


def keys_at(tokens: bytes, *blocks: int) -> bytes:
    keys = short_keys(tokens)
    return b"".join(keys[8 * block : 8 * block + 8] for block in blocks)


def with_checkpoints(placement: Placement, name: str, keys: bytes = b"") -> None:
    hello = Hello(name, "sha256", b"model", 16, 1000, hits_at_ends=True)
    placement.apply_events(name, [hello, Snapshot(0, "device", keys, True, True)])


def test_a_checkpoint_counts_for_all_blocks_before_it() -> None:
    placement = Placement(PolicyConfig(), Clock(), seed=1)
    for name in ("states", "blocks"):
        placement.add_replica(name, ReplicaInfo(b"model", 16, 1000))
        placement.set_available(name, True)
    prompt = ids(1)  # ten blocks
    with_checkpoints(placement, "states", keys_at(prompt, 3, 7))
    dense = Hello("blocks", "sha256", b"model", 16, 1000)
    placement.apply_events("blocks", [dense, Snapshot(0, "device", short_keys(prompt)[: 8 * 6], True, True)])
    assert cached(placement, prompt) == {"states": 8 * 16, "blocks": 6 * 16}
    assert cached(placement, prompt[: 4 * 8 * 16]) == {"states": 4 * 16, "blocks": 6 * 16}, "its last token is computed"
    assert cached(placement, prompt[: 4 * 7 * 16]) == {"states": 4 * 16, "blocks": 6 * 16}
    assert cached(placement, prompt[: 4 * 3 * 16]) == {"states": 0, "blocks": 3 * 16}
    placement.apply_events(
        "states", [Changes(1, "host", keys_at(prompt, 8), b""), Changes(2, "device", b"", keys_at(prompt, 7))]
    )
    assert cached(placement, prompt)["states"] == 4 * 16 + 0.8 * 5 * 16
    placement.check()


def test_a_request_that_was_just_sent_predicts_its_last_checkpoint_alone() -> None:
    clock = Clock()
    placement = Placement(PolicyConfig(), clock, seed=1)
    placement.add_replica("r0", ReplicaInfo(b"model", 16, 1000))
    placement.set_available("r0", True)
    with_checkpoints(placement, "r0")
    prompt = ids(1, 167)  # ten blocks and seven tokens
    assert placement.choose(placement.prepare(prompt), num_tokens=167)
    assert cached(placement, prompt) == {"r0": 160}
    assert cached(placement, prompt[: 4 * 100]) == {"r0": 0}, "there is no checkpoint"
    even = ids(2)  # the checkpoint lies before the last token's block
    assert placement.choose(placement.prepare(even), num_tokens=160)
    assert cached(placement, even) == {"r0": 144}
    short = ids(3, 16)
    assert placement.choose(placement.prepare(short), num_tokens=16)
    assert cached(placement, short) == {"r0": 0}
    for _ in range(6):
        clock.now_s += 1.0
        placement.apply_events("r0", [Alive(0)])
        placement.choose(None, num_tokens=1)
    assert cached(placement, prompt) == {"r0": 0}


def test_the_router_predicts_no_more_than_the_engine_has_cached() -> None:
    """Random requests go to an engine with states, and its frames to a router, whose predictions are compared."""
    num_predicted = num_cached = 0
    for seed in range(3):
        rng = random.Random(seed)
        least = sum(group.most_pages(64, 16, BLOCK_SIZE) for group in GROUPS)
        world = World(num_blocks=least + 60, groups=GROUPS, num_host_blocks=400)
        groups, info = world.scheduler.kv, world.executor.info
        assert info.hits_at_ends
        pools = {"device": world.scheduler.pool, "host": world.tiers.index.host}
        log = CacheLog({tier: UsableKeys(pool, groups) for tier, pool in pools.items()}, groups.keys)
        placement = Placement(PolicyConfig(host_credit=1.0), Clock(), seed=1)
        placement.add_replica("r0", ReplicaInfo(info.fingerprint, BLOCK_SIZE, info.num_blocks))
        placement.apply_events("r0", [Hello("e", "sha256", info.fingerprint, BLOCK_SIZE, info.num_blocks, True)])
        log.watch(True)
        seq, prompts = 0, []
        for number in range(60):
            message = random_request(rng, number, 50, 64)
            prompts.append(message)
            world.submit(message)
            for _ in range(rng.randint(0, 4)):
                world.step()
            for update in log.updates():
                if update.is_snapshot:
                    frames = [Snapshot(seq, update.tier, update.stored, update.tier == "device", update.tier == "host")]
                    placement.apply_events("r0", frames)
                else:
                    seq += 1
                    placement.apply_events("r0", [Changes(seq, update.tier, update.stored, update.removed)])
            for message in prompts[-8:]:
                predicted = cached(placement, message.tokens, message.cache_salt, message.adapter)["r0"] // BLOCK_SIZE
                root = placement._replicas["r0"].cache.space.root(message.cache_salt, message.adapter)
                request = Request(message, 0, 0.0, array("i", message.tokens), 1, RequestKv(root, skips_cache=False))
                world.scheduler.kv.keys.extend(request)
                num_hit = groups.keys.find(request, world.tiers.page_of).num_blocks
                assert predicted <= num_hit, f"seed {seed}, request {number}"
                num_predicted += predicted
                num_cached += num_hit
        placement.check()
        world.run()
        world.executor.close()
    assert num_predicted > 0.7 * num_cached > 0
