"""Cache events of vLLM and SGLang, as keys of ours."""

import itertools
from typing import Any

import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Changes
from penstock.router.placement.engine_blocks import BadEvents, EngineBlocks, OtherBlockSize
from tests.support.engine_publisher import CLEARED, as_array, batch, names_of, removed, stored

TOKENS = list(range(100, 164))  # four blocks


def keys(tokens: list[int], size: int = 16, **root: Any) -> set[bytes]:
    return {key[:8] for key in block_keys(tokens, size, root=namespace_root(**root))}


class World:
    """The keys of the blocks in each tier, as a router knows them after each batch."""

    def __init__(self, size: int = 16) -> None:
        self.blocks = EngineBlocks(b"", size, "e")
        self.keys: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}

    def take(self, *events: Any) -> "World":
        for frame in self.blocks.take(batch(*events)):
            assert isinstance(frame, Changes)
            if frame.cleared:
                self.keys[frame.tier].clear()
            self.keys[frame.tier] -= {frame.removed[at : at + 8] for at in range(0, len(frame.removed), 8)}
            self.keys[frame.tier] |= {frame.stored[at : at + 8] for at in range(0, len(frame.stored), 8)}
        self.blocks.check()
        return self


@pytest.mark.parametrize("shape", [dict, as_array])
def test_blocks_get_the_keys_that_a_prompt_of_their_tokens_has(shape: Any) -> None:
    first, rest = shape(stored(TOKENS[:32])), shape(stored(TOKENS, start=2))
    assert World().take(first, rest).keys["device"] == keys(TOKENS)


def test_block_hashes_may_be_numbers() -> None:
    event = stored(TOKENS[:32]) | {"block_hashes": [-5, 2**63]}
    world = World().take(as_array(event))
    assert world.keys["device"] == keys(TOKENS[:32])
    assert not world.take(as_array(removed([-5, 2**63]))).keys["device"]


def test_a_block_that_was_stored_twice_goes_when_it_is_removed_twice() -> None:
    names = names_of(TOKENS, 16)
    world = World().take(stored(TOKENS), stored(TOKENS, start=3))
    assert world.take(removed(names[3:])).keys["device"] == keys(TOKENS)
    assert world.take(removed(names[2:])).keys["device"] == keys(TOKENS[:32])
    assert world.take(CLEARED).keys["device"] == set()
    assert world.take(stored(TOKENS)).keys["device"] == keys(TOKENS)


def test_within_a_batch_the_last_event_of_a_block_counts() -> None:
    names = names_of(TOKENS, 16)
    assert World().take(stored(TOKENS), removed(names[1:])).keys["device"] == keys(TOKENS[:16])
    world = World().take(stored(TOKENS))
    assert world.take(removed(names[3:]), stored(TOKENS, start=3)).keys["device"] == keys(TOKENS)
    assert world.take(stored(TOKENS), CLEARED, stored(TOKENS[:16])).keys["device"] == keys(TOKENS[:16])


def test_adapters_and_salts_have_namespaces_of_their_own() -> None:
    adapter = stored(TOKENS, lora_name="a", lora_id=3, extra_keys=[["a"]] * 4)
    salted = stored(TOKENS, extra_keys=[["pepper"], None, None, None])
    assert World().take(adapter).keys["device"] == keys(TOKENS, adapter="a")
    assert World().take(salted).keys["device"] == keys(TOKENS, salt="pepper")
    sglangs = stored(TOKENS, cache_salt="pepper", session_id="s")
    assert World().take(sglangs).keys["device"] == keys(TOKENS, salt="pepper")
    both = stored(TOKENS, lora_name="a", extra_keys=[["a", "pepper"], ["a"], ["a"], ["a"]])
    assert World().take(both).keys["device"] == keys(TOKENS, adapter="a", salt="pepper")


def test_blocks_of_images_and_all_behind_them_are_left_out() -> None:
    world = World().take(stored(TOKENS, extra_keys=[None, None, [["image", 3]], None]))
    assert world.keys["device"] == keys(TOKENS[:32]) and world.blocks.counts["not_text"] == 2
    longer = [*TOKENS, *range(16)]
    assert world.take(stored(longer, start=4)).blocks.counts["unknown_parent"] == 1


def test_deeper_tiers_are_kept_apart() -> None:
    names = names_of(TOKENS, 16)
    world = World().take(stored(TOKENS), stored(TOKENS, medium="CPU_PINNED"), stored(TOKENS[:16], medium="DISK"))
    world.take(removed(names))
    assert (world.keys["device"], world.keys["host"]) == (set(), keys(TOKENS))
    assert world.keys["disk"] == keys(TOKENS[:16])
    assert not World().take(stored(TOKENS, medium="STORAGE", locality="REMOTE")).keys["disk"]


def test_the_events_of_full_attention_layers_count() -> None:
    window = stored(TOKENS, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored(TOKENS, group_idx=1, kv_cache_spec_kind="full_attention")
    names = names_of(TOKENS, 16)
    world = World().take(window, whole, removed(names, group_idx=0))
    assert world.keys["device"] == keys(TOKENS)
    assert world.take(removed(names, group_idx=1)).keys["device"] == set()


def test_another_block_size_is_an_error_before_a_block_is_stored() -> None:
    with pytest.raises(OtherBlockSize) as error:
        World(16).take(stored(TOKENS, size=32))
    assert error.value.block_size == 32
    assert World(16).take(stored(TOKENS), stored(TOKENS, size=32)).keys["device"] == keys(TOKENS)


def test_unknown_events_and_fields_are_ignored_and_invalid_ones_refused() -> None:
    later = stored(TOKENS) | {"colour": "blue"}
    assert World().take({"type": "BlockPainted"}, ["BlockPainted", 1], later).keys["device"] == keys(TOKENS)
    assert World().take([*as_array(stored(TOKENS)), None, 0, "full_attention"]).keys["device"] == keys(TOKENS)
    for rubbish in (b"", b"\xc1", b"\x80", b"\x91\x01", batch(7), batch(["BlockStored", 1]), batch({"x": 1})):
        with pytest.raises(BadEvents):
            EngineBlocks(b"", 16, "e").take(rubbish)
    with pytest.raises(BadEvents):
        EngineBlocks(b"", 16, "e").take(batch(stored([-1] * 16)))


def test_of_pairs_of_tokens_the_first_ones_count() -> None:
    pairs = [list(each) for each in itertools.pairwise([*TOKENS, 1])]
    assert World().take(stored(TOKENS, token_ids=pairs)).keys["device"] == keys(TOKENS)
