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
    """What a router would know after each batch."""

    def __init__(self, size: int = 16) -> None:
        self.blocks = EngineBlocks(b"", size, "e")
        self.known: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}

    def take(self, *events: Any) -> "World":
        for frame in self.blocks.take(batch(*events)):
            assert isinstance(frame, Changes)
            if frame.cleared:
                self.known[frame.tier].clear()
            self.known[frame.tier] -= {frame.removed[at : at + 8] for at in range(0, len(frame.removed), 8)}
            self.known[frame.tier] |= {frame.stored[at : at + 8] for at in range(0, len(frame.stored), 8)}
        self.blocks.check()
        return self


@pytest.mark.parametrize("shape", [dict, as_array])
def test_blocks_get_the_keys_that_a_prompt_of_their_tokens_has(shape: Any) -> None:
    first, rest = shape(stored(TOKENS[:32])), shape(stored(TOKENS, start=2))
    assert World().take(first, rest).known["device"] == keys(TOKENS)


def test_numbers_serve_as_names_too() -> None:
    event = stored(TOKENS[:32]) | {"block_hashes": [-5, 2**63]}
    world = World().take(as_array(event))
    assert world.known["device"] == keys(TOKENS[:32])
    assert not world.take(as_array(removed([-5, 2**63]))).known["device"]


def test_what_is_removed_is_gone_and_what_was_stored_twice_goes_at_the_second_time() -> None:
    names = names_of(TOKENS, 16)
    world = World().take(stored(TOKENS), stored(TOKENS, start=3))
    assert world.take(removed(names[3:])).known["device"] == keys(TOKENS)
    assert world.take(removed(names[2:])).known["device"] == keys(TOKENS[:32])
    assert world.take(CLEARED).known["device"] == set()
    assert world.take(stored(TOKENS)).known["device"] == keys(TOKENS)


def test_within_a_batch_the_last_word_counts() -> None:
    names = names_of(TOKENS, 16)
    assert World().take(stored(TOKENS), removed(names[1:])).known["device"] == keys(TOKENS[:16])
    world = World().take(stored(TOKENS))
    assert world.take(removed(names[3:]), stored(TOKENS, start=3)).known["device"] == keys(TOKENS)
    assert world.take(stored(TOKENS), CLEARED, stored(TOKENS[:16])).known["device"] == keys(TOKENS[:16])


def test_adapters_and_salts_have_namespaces_of_their_own() -> None:
    adapter = stored(TOKENS, lora_name="a", lora_id=3, extra_keys=[["a"]] * 4)
    salted = stored(TOKENS, extra_keys=[["pepper"], None, None, None])
    assert World().take(adapter).known["device"] == keys(TOKENS, adapter="a")
    assert World().take(salted).known["device"] == keys(TOKENS, salt="pepper")
    sglangs = stored(TOKENS, cache_salt="pepper", session_id="s")
    assert World().take(sglangs).known["device"] == keys(TOKENS, salt="pepper")
    both = stored(TOKENS, lora_name="a", extra_keys=[["a", "pepper"], ["a"], ["a"], ["a"]])
    assert World().take(both).known["device"] == keys(TOKENS, adapter="a", salt="pepper")


def test_blocks_that_more_than_text_names_are_left_out_and_all_behind_them() -> None:
    world = World().take(stored(TOKENS, extra_keys=[None, None, [["image", 3]], None]))
    assert world.known["device"] == keys(TOKENS[:32]) and world.blocks.counts["not_text"] == 2
    longer = [*TOKENS, *range(16)]
    assert world.take(stored(longer, start=4)).blocks.counts["unknown_parent"] == 1


def test_deeper_tiers_are_known_apart() -> None:
    names = names_of(TOKENS, 16)
    world = World().take(stored(TOKENS), stored(TOKENS, medium="CPU_PINNED"), stored(TOKENS[:16], medium="DISK"))
    world.take(removed(names))
    assert (world.known["device"], world.known["host"]) == (set(), keys(TOKENS))
    assert world.known["disk"] == keys(TOKENS[:16])
    assert not World().take(stored(TOKENS, medium="STORAGE", locality="REMOTE")).known["disk"]


def test_of_several_groups_of_layers_one_that_needs_every_block_speaks() -> None:
    window = stored(TOKENS, group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored(TOKENS, group_idx=1, kv_cache_spec_kind="full_attention")
    names = names_of(TOKENS, 16)
    world = World().take(window, whole, removed(names, group_idx=0))
    assert world.known["device"] == keys(TOKENS)
    assert world.take(removed(names, group_idx=1)).known["device"] == set()


def test_another_block_size_shows_before_anything_is_stored() -> None:
    with pytest.raises(OtherBlockSize) as found:
        World(16).take(stored(TOKENS, size=32))
    assert found.value.block_size == 32
    assert World(16).take(stored(TOKENS), stored(TOKENS, size=32)).known["device"] == keys(TOKENS)


def test_unknown_events_and_fields_are_passed_over_and_rubbish_is_refused() -> None:
    later = stored(TOKENS) | {"colour": "blue"}
    assert World().take({"type": "BlockPainted"}, ["BlockPainted", 1], later).known["device"] == keys(TOKENS)
    assert World().take([*as_array(stored(TOKENS)), None, 0, "full_attention"]).known["device"] == keys(TOKENS)
    for rubbish in (b"", b"\xc1", b"\x80", b"\x91\x01", batch(7), batch(["BlockStored", 1]), batch({"x": 1})):
        with pytest.raises(BadEvents):
            EngineBlocks(b"", 16, "e").take(rubbish)
    with pytest.raises(BadEvents):
        EngineBlocks(b"", 16, "e").take(batch(stored([-1] * 16)))


def test_tokens_that_are_told_with_the_next_one_are_taken_alone() -> None:
    pairs = [list(each) for each in itertools.pairwise([*TOKENS, 1])]
    assert World().take(stored(TOKENS, token_ids=pairs)).known["device"] == keys(TOKENS)
