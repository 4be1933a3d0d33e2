"""Streaming detokenizing: however a sequence is cut, its pieces add up to the whole that the library decodes. A choice turns the core's
outputs of one sequence into the text of its user; a stop string ends it wherever it is cut."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from penstock.engine.front.answer import Choice, Update, joined
from penstock.engine.messages import FinishReason, Output
from penstock.engine.model_error import ModelError
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.detokenize import Detokenizer
from penstock.engine.text.stop_strings import StopStrings
from penstock.executor.protocol import TokenLogprobs
from tests.support import text_samples as samples
from tests.support.refusals import cases, table

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


@pytest.mark.parametrize(("make", "tokens", "pieces"), cases(__file__, "tokens that wait", **vars(samples)))
def test_bytes_wait_for_the_end_of_their_character_or_run(
    make: Callable[[], Tokenizer], tokens: list[str], pieces: list[str]
) -> None:
    tokenizer = make()
    stream = Detokenizer(tokenizer, frozenset()).stream()
    assert [stream.push([tokenizer.get_vocab()[token]]) for token in tokens] == pieces
    assert stream.flush() == ""


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


class Letters:
    """A stream in which ids are ASCII, but for the end's id, which has no text."""

    def push(self, ids: list[int]) -> str:
        return "".join(chr(token_id) for token_id in ids if token_id < 128)

    def flush(self) -> str:
        return ""


def output(text: str, finish_reason: FinishReason | None = None, **fields: Any) -> Output:
    return Output("r", [ord(letter) for letter in text], finish_reason, **fields)


def choice(**params: Any) -> Choice:
    return Choice(0, SamplingParams(**params), Letters())


def test_nothing_comes_after_the_end() -> None:
    one = choice(stop="x")
    one.push(output("x"))
    for later in (output("abc"), output("", "abort")):
        assert one.push(later) == Update(0)


@pytest.mark.parametrize(("params", "text", "reason"), cases(__file__, "tokens that end"))
def test_an_end_token_is_listed_and_text_on_request(params: dict[str, Any], text: str, reason: int | None) -> None:
    one = choice(**params)
    last = one.push(output("abc", "stop", stop_token=ord("c")))
    assert (last.text, last.token_ids[-1], last.stop_reason) == (text, ord("c"), reason)
    assert last.finish_reason == "stop"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "axbx"[:3]), (3, "axb"), (4, "axbxc")])
def test_a_stop_string_counts_only_behind_the_least_number_of_tokens(min_tokens: int, text: str) -> None:
    for cut in range(6):  # however the core hands them over
        one = choice(stop="x", min_tokens=min_tokens)
        parts = [one.push(output("axbxc"[:cut])), one.push(output("axbxc"[cut:], "length"))]
        assert joined(parts).text == text


def test_logprobs_are_dropped_with_their_tokens() -> None:
    entries = [TokenLogprobs((ord(letter),), (-1.0,), 1) for letter in "axb"]
    one = choice(stop="x")
    last = one.push(output("axb", logprobs=entries))
    assert last.logprobs == entries[:2] and last.token_ids == [ord("a"), ord("x")]
    assert choice().push(output("axb", logprobs=entries)).logprobs == entries
    assert choice().push(output("axb")).logprobs is None


def test_an_error_keeps_what_was_held_back() -> None:
    one = choice(stop="END")
    one.push(output("EN"))
    last = one.push(output("", "error", error="out of memory"))
    assert (last.text, last.finish_reason, one.is_running) == ("EN", "error", False)


@pytest.mark.parametrize(("stop", "text"), [((), "a\ufffd"), (("x",), "a\ufffd"), (("\ufffd",), "a")])
def test_half_a_character_at_the_end_is_text_and_may_be_a_stop_string(stop: Sequence[str], text: str) -> None:
    tokenizer = samples.byte_level()
    one = Choice(0, SamplingParams(stop=[*stop]), Detokenizer(tokenizer, frozenset()).stream())
    assert one.push(Output("r", tokenizer.encode("a😀").ids[:-1], "length")).text == text


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the end and the name of the string that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_are_cut_where_brute_force_cuts_them(include: bool) -> None:
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(4000):
        alphabet = "ab" if rng.random() < 0.5 else "abc\n"
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        whole = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        expected = first_stop(whole, stops)
        text = StopStrings(stops, include)
        at, shown = 0, ""
        while at < len(whole) and text.matched is None:
            size = rng.randint(0, 5)
            shown += text.push(whole[at : at + size])
            at += size
            if text.matched is None:
                held = max(size for stop in stops for size in range(len(stop)) if whole[:at].endswith(stop[:size]))
                assert shown == whole[: len(whole[:at]) - held], "no more is held back than may become a stop string"
        if expected is None:
            assert (text.matched, shown + text.flush()) == (None, whole)
        else:
            num_stopped += 1
            end, stop = expected
            assert (text.matched, shown) == (stop, whole[: end if include else end - len(stop)])
    assert 1000 < num_stopped < 3900
