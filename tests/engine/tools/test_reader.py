"""Calls in text, as models write them and wrong ones, however it is cut into pieces."""

import random
from itertools import combinations

import pytest

from penstock.engine.text.tools.answer_reader import MAX_FALSE, AnswerReader
from penstock.engine.text.tools.reader import MAX_CALLS, CallStart
from penstock.engine.text.tools.scan import MAX_DEPTH, MAX_FRAME_CHARS
from penstock.engine.text.tools.thinking import THINK, Thinking
from tests.support.refusals import cases, hardest
from tests.support.tool_samples import (
    BROKEN,
    CALL,
    CALLS,
    CERTAIN,
    FORMATS,
    GOOD,
    NO_CALLS,
    QUOTED,
    WRITTEN,
    Sample,
    calls_of,
    read,
)

WEATHER = ("weather", '{"city": "Ulm"}')
HEAD = '<tool_call>{"name": "weather", "arguments": '

BY_FORMAT = pytest.mark.parametrize("name", FORMATS)
MAX_PAIRS_CHARS = 48  # of a text that is cut at every pair of places

# These texts have no call: they are content, and reading goes on behind them.
BAD = [
    *BROKEN,
    "<tool_call>" + " " * MAX_FRAME_CHARS + '{"name": "clock", "arguments": {}}</tool_call>',
    HEAD + '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}</tool_call>",
]


def cuts(text: str, seed: int) -> list[list[str]]:
    """One piece; all single characters; two pieces in every way; some random ways."""
    chosen = [[text], list(text), *([text[:at], text[at:]] for at in range(min(len(text), 400)))]
    choose = random.Random(seed)
    for _ in range(20):
        places = sorted(choose.choices(range(len(text) + 1), k=choose.randint(2, 8)))
        chosen.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return chosen


@BY_FORMAT
@CERTAIN
@pytest.mark.parametrize("samples", [GOOD, WRITTEN, QUOTED], ids=["good", "written", "quoted"])
def test_calls_are_read_as_models_write_them(name: str, certain: bool, samples: dict[str, list[Sample]]) -> None:
    for text, content, calls in samples.get(name, []):
        assert read([text], calls_of(name), certain=certain) == ("", content, calls), text


@pytest.mark.parametrize("name", NO_CALLS)
def test_a_text_without_a_call_is_content_to_the_letter(name: str) -> None:
    for text in NO_CALLS[name] + (BAD if name == "hermes" else []):
        assert read([text], calls_of(name)) == ("", text, []), text
        assert read([f"so {text} and "], calls_of(name)) == ("", f"so {text} and ", [])


@pytest.mark.parametrize("name", hardest(FORMATS, "hermes"))
@pytest.mark.parametrize("certain", hardest([False, True], False), ids=["free", "held"])
def test_a_text_gives_the_same_calls_and_content_however_it_is_cut(name: str, certain: bool) -> None:
    """In two, short texts in three, in pieces of one length as steps with several tokens bring them, and at random."""
    samples = [*GOOD.get(name, []), *WRITTEN[name], *QUOTED.get(name, [])]
    for text in [text for text, _, _ in samples] + NO_CALLS.get(name, []) + (BAD if name == "hermes" else []):
        whole = read([text], calls_of(name), certain=certain)
        ways = cuts(text, len(text))
        ways += [[text[at : at + size] for at in range(0, len(text), size)] for size in (2, 3, 7, 16)]
        if len(text) <= MAX_PAIRS_CHARS:
            ways += [[text[:a], text[a:b], text[b:]] for a, b in combinations(range(1, len(text)), 2)]
        for pieces in ways:
            assert read(pieces, calls_of(name), certain=certain) == whole, pieces


@pytest.mark.parametrize("text", [text for text in BAD if text.endswith("</tool_call>")])
def test_a_call_behind_a_malformed_one_is_read(text: str) -> None:
    assert read([text + CALL["hermes"]], calls_of("hermes")) == ("", text, [WEATHER])


@pytest.mark.parametrize("name", hardest(FORMATS, "hermes"))
def test_random_texts_lose_nothing_and_do_not_depend_on_the_cut(name: str) -> None:
    choose, form = random.Random(5), FORMATS[name]
    parts = [*form.marks, *form.tokens, CALL[name], CALLS[name], "{", "}", "[", "]", '"', "\\", ",", ":", " ",
             "\n", "weather", '"name"', '"arguments"', '"parameters"', "a", ";", "<", "<think>", "</think>", "ü"]  # fmt: skip
    for _ in range(60):
        text = "".join(choose.choices(parts, k=choose.randint(1, 25)))
        for certain in (False, True):
            for thinking in (None, Thinking(THINK), Thinking(THINK, True)):
                whole = read([text], calls_of(name), thinking, certain=certain)
                for pieces in (list(text), *cuts(text, len(text))[-4:]):
                    assert read(pieces, calls_of(name), thinking, certain=certain) == whole
        _, content, calls = read([text], calls_of(name))
        if not calls:
            assert content == text


@BY_FORMAT
def test_arguments_stream_as_they_come_where_a_grammar_holds_the_model(name: str) -> None:
    reader = AnswerReader(calls_of(name, must=True), None, is_certain=True)
    seen = [reader.feed(character) for character in CALL[name]]
    starts = [place for place, pieces in enumerate(seen) if any(isinstance(piece, CallStart) for piece in pieces)]
    fragments = [piece.text for pieces in seen for piece in pieces if not isinstance(piece, CallStart)]
    assert fragments == list('{"city": "Ulm"}')
    assert starts == [CALL[name].index('{"city"')]  # with the brace, and not earlier


@BY_FORMAT
def test_without_a_grammar_a_call_is_read_when_it_is_complete_and_valid(name: str) -> None:
    reader = AnswerReader(calls_of(name), None, is_certain=False)
    seen = [reader.feed(character) for character in CALL[name]]
    last = CALL[name].rindex("}")
    assert [len(pieces) for pieces in seen[: last + 1]] == [0] * last + [2]


def test_text_is_held_back_only_while_it_may_become_a_mark() -> None:
    reader = AnswerReader(calls_of("hermes"), None, is_certain=False)
    read = [
        "".join(getattr(piece, "text", "") for piece in reader.feed(part))
        for part in ("a <", "tool", "_x", "<", "b", " ", "c")
    ]
    assert read == ["a", "", " <tool_x", "", "<b", "", " c"]


def test_arguments_that_break_a_grammar_s_promise_stay_where_they_were_read() -> None:
    text = HEAD + '{"city": "Ulm"</tool_call> and on'
    assert read([text], calls_of("hermes"), certain=True) == (
        "", "</tool_call> and on", [("weather", '{"city": "Ulm"')]
    )  # fmt: skip


def test_held_optional_calls_that_are_cut_off_behind_their_mark_are_no_content() -> None:
    for rest, content in (('>{"name": "wea', "so"), ("", "so <tool_call")):
        assert read(["so <tool_call" + rest], calls_of("hermes"), certain=True) == ("", content, [])


def test_one_call_is_the_limit_where_no_more_are_wanted() -> None:
    for name in ("hermes", "mistral", "mistral with args"):
        for certain in (False, True):
            _, content, calls = read([CALLS[name]], calls_of(name, many=False), certain=certain)
            assert calls == [WEATHER]
            assert "clock" in content


def test_calls_and_false_beginnings_are_bounded() -> None:
    _, content, calls = read([CALL["hermes"] * (MAX_CALLS + 2)], calls_of("hermes"))
    assert len(calls) == MAX_CALLS
    assert content == CALL["hermes"] * 2
    false = "<tool_call>" * (MAX_FALSE + 1)
    assert read([false + CALL["hermes"]], calls_of("hermes")) == ("", false + CALL["hermes"], [])


# Every character costs a bounded number of steps: twice the text may cost twice as many calls into the reader's parts,
# however nasty it is. Times are for benchmarks; these texts only have to come back whole.
@pytest.mark.parametrize("unit", cases(__file__, "pieces of a hostile megabyte", HEAD=HEAD))
@pytest.mark.parametrize("before", hardest(["", HEAD + '{"a": [', HEAD + '{"a": "'], HEAD + '{"a": ['))
def test_a_hostile_megabyte_comes_back_whole(unit: str, before: str) -> None:
    text = before + unit * (1_000_000 // len(unit))
    assert read([text], calls_of("hermes")) == ("", text, [])
