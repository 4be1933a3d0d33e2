"""Calls as models write them: read, however they are cut. What a grammar of optional calls lets through is held to it."""

import json
import random
from itertools import combinations

import pytest

from tests.engine.tools.test_lark import lark
from tests.engine.tools.test_reader import BAD, cuts
from tests.support.refusals import hardest
from tests.support.tool_samples import FORMATS, calls_of, read
from tests.support.written import GOOD, NO_CALLS, QUOTED, WRITTEN, C, P, Sample, W

READ = {name: [*GOOD.get(name, []), *WRITTEN[name], *QUOTED.get(name, [])] for name in FORMATS}
BY_FORMAT = pytest.mark.parametrize("name", FORMATS)
CERTAIN = pytest.mark.parametrize("certain", [False, True], ids=["free", "held"])
MAX_PAIRS_CHARS = 48  # of a text that is cut at every pair of places


@BY_FORMAT
@CERTAIN
@pytest.mark.parametrize("samples", [GOOD, WRITTEN, QUOTED], ids=["good", "written", "quoted"])
def test_calls_are_read_as_models_write_them(name: str, certain: bool, samples: dict[str, list[Sample]]) -> None:
    for text, content, calls in samples.get(name, []):
        assert read([text], calls_of(name), certain=certain) == ("", content, calls), text


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_calls_nothing_is_content_to_the_letter(name: str) -> None:
    for text in NO_CALLS[name]:
        assert read([text], calls_of(name)) == ("", text, []), text


@pytest.mark.parametrize("name", hardest(FORMATS, "hermes"))
@pytest.mark.parametrize("certain", hardest([False, True], False), ids=["free", "held"])
def test_a_text_gives_the_same_calls_and_content_however_it_is_cut(name: str, certain: bool) -> None:
    """In two, short texts in three, in pieces of one length as steps with several tokens bring them, and at random."""
    for text in [text for text, _, _ in READ[name]] + NO_CALLS.get(name, []) + (BAD if name == "hermes" else []):
        whole = read([text], calls_of(name), certain=certain)
        ways = cuts(text, len(text))
        ways += [[text[at : at + size] for at in range(0, len(text), size)] for size in (2, 3, 7, 16)]
        if len(text) <= MAX_PAIRS_CHARS:
            ways += [[text[:a], text[a:b], text[b:]] for a, b in combinations(range(1, len(text)), 2)]
        for pieces in ways:
            assert read(pieces, calls_of(name), certain=certain) == whole, pieces


NUM_WALKS = 120
# What a walk through a grammar tries to write, besides single bytes.
PIECES = [
    *("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```json\n", "```"),
    *('{"name": "', "weather", "clock", "Bob", '"', '{"type": "function", "name": "', '{"', 'name": "', "name", "type"),
    *(", ", ",", "; ", ";", "\n", "\n\n", " ", "[", "]", "{", "}", "}}", ": ", "arguments", "parameters", "id", "a1"),
    *('", "arguments": {', '", "parameters": {', '"city": "Ulm"', '"days": 3', '{"city": "Ulm"}', "{}", W, P, C, "and"),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.triggers])
def test_whatever_is_read_was_held_to_its_schema(name: str) -> None:
    """Walks at random: the reader takes nothing for a call that the grammar took for free text, and whether it knows
    that there was a grammar makes no difference."""
    pieces, first = [piece.encode() for piece in PIECES], lark(False, calls_of(name))
    num_called = 0
    for seed in range(NUM_WALKS):
        matcher, choose, text = first.deep_copy(), random.Random(seed), b""
        while len(text) < 400 and not (text and matcher.is_accepting() and choose.random() < 0.03):
            piece = choose.choice(pieces)
            if matcher.validate_tokens([*piece]) < len(piece):
                bias = matcher.compute_logit_bias()
                allowed = [byte for byte in range(32, 127) if bias[byte]] + [byte for byte in (10,) if bias[byte]]
                piece = bytes([choose.choice(allowed)])
            assert matcher.consume_tokens([*piece])
            text += piece
        if matcher.is_accepting():
            _, _, calls = read([text.decode()], calls_of(name), certain=True)
            num_called += len(calls)
            assert calls == read([text.decode()], calls_of(name), certain=False)[2], text
            for called, arguments in calls:
                given = json.loads(arguments)
                assert given.keys() <= ({"city", "days"} if called == "weather" else set()), text
                assert called == "clock" or isinstance(given["city"], str), text
    assert num_called > NUM_WALKS // 10
