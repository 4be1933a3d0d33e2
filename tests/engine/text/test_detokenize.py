"""Streaming detokenizing: however a sequence is cut, its pieces add up to the whole that the library decodes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from penstock.engine.model_error import ModelError
from penstock.engine.text.detokenize import Detokenizer
from tests.support import text_samples as samples
from tests.support.refusals import table

KINDS = samples.FAMILIES | {"no decoder": samples.undecorated}


@pytest.fixture(params=KINDS, name="tokenizer")
def _tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = KINDS[request.param]()
    tokenizer.add_special_tokens(["<|tool|>"])
    tokenizer.add_tokens(["<think>", "two words", "日本"])
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def streamed(detokenizer: Detokenizer, ids: list[int], skip: bool, rng: random.Random) -> str:
    stream = detokenizer.stream(skip)
    parts = []
    while ids:
        count = rng.randint(1, 4)
        parts.append(stream.push(ids[:count]))
        ids = ids[count:]
    return "".join(parts) + stream.flush()


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_stream_to_what_the_library_decodes_at_once(tokenizer: Tokenizer, skip: bool) -> None:
    """Random ids are mostly invalid UTF-8, with special tokens and ids beyond the vocabulary in between."""
    detokenizer = Detokenizer(tokenizer, special_ids(tokenizer))
    rng = random.Random(0)
    size = tokenizer.get_vocab_size()
    for _ in range(600):
        ids = [rng.randrange(size + 2) for _ in range(rng.randint(0, 20))]
        assert streamed(detokenizer, ids, skip, rng) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_a_character_split_over_tokens_comes_when_it_is_complete() -> None:
    tokenizer = samples.byte_level()
    stream = Detokenizer(tokenizer, frozenset()).stream()
    ids = tokenizer.encode("😀").ids
    assert len(ids) == 4
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "", "😀"]
    assert stream.flush() == ""


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """One bad byte spoils all of the run."""
    tokenizer = samples.sentencepiece()
    good, bad = ([tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in data] for data in ("日".encode(), b"\xe6"))
    letter = tokenizer.token_to_id("a") or 0
    detokenizer = Detokenizer(tokenizer, frozenset())
    stream = detokenizer.stream()
    assert [stream.push([token_id]) for token_id in [*good, letter]] == ["", "", "", "日a"]
    stream = detokenizer.stream()
    assert [stream.push([token_id]) for token_id in [*good, *bad, letter]] == ["", "", "", "", "\ufffd" * 4 + "a"]


@pytest.mark.parametrize("make", [samples.sentencepiece, samples.metaspace])
def test_the_first_space_is_dropped_unless_the_text_continues_a_prompt(make: Callable[[], Any]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, frozenset())
    assert detokenizer.stream().push(ids) == "hello world"
    assert detokenizer.stream(keep_leading_space=True).push(ids) == " hello world"


def test_an_id_that_the_vocabulary_lacks_has_no_bytes() -> None:
    assert Detokenizer(samples.sentencepiece(), frozenset()).token_bytes(1 << 20) == b""
    assert Detokenizer(samples.byte_level(), frozenset()).token_bytes(1 << 20) == b""


@pytest.mark.parametrize("decoder", table(__file__, "decoders", decoders=decoders))
def test_a_decoder_that_is_not_understood_is_refused_rather_than_approximated(decoder: decoders.Decoder) -> None:
    tokenizer = samples.sentencepiece()
    tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="its decoder is .*; supported are ByteLevel"):
        Detokenizer(tokenizer, frozenset())
