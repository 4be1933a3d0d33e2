"""Calls in the formats that have objects as calls, and the shortest way to read an answer and to follow a grammar.

written.json has answers as models write them, by format, with what is read of each: [text, content, calls]. `WRITTEN` are
calls written in other ways than the model's template writes them; the spellings are those that the parsers of other servers
are tested with, the texts are our own. In `QUOTED` the arguments are a string that holds them: a grammar has an object
instead, since it can hold that to its schema. `NO_CALLS` speak of calls or are broken, so they are content. `GOOD` mixes
calls and text, and `BROKEN` are calls in the format of Hermes that break off or are wrong.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.grammar.tool_calls import grammar
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.tools.answer_reader import AnswerReader
from penstock.engine.text.tools.call_kinds import Calls, ToolFormat, ToolSpec
from penstock.engine.text.tools.harmony import HarmonyReader
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning
from penstock.engine.text.tools.thinking import Thinking
from tests.support.call_writers import FORMS, WRITERS
from tests.support.fake_engine import byte_tokenizer

SPECIAL = pytest.mark.parametrize("special", [False, True], ids=["marks as text", "marks as tokens"])
CERTAIN = pytest.mark.parametrize("certain", [False, True], ids=["free", "held"])

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("written.json").read_text())
WEATHER = ToolSpec("weather", _DATA["weather"])
CLOCK = ToolSpec("clock", {"type": ["object", "null"], "properties": {}, "additionalProperties": False})
# The formats that have objects as calls, and what each makes of one call, and of two.
FORMATS: dict[str, ToolFormat] = {
    name: FORMS[name] for name in ("hermes", "llama3_json", "mistral", "mistral with args", "qwen2_5_coder")
}
CALL = {name: WRITERS[name]([("weather", {"city": "Ulm"})]) for name in FORMATS}
CALLS = {name: WRITERS[name]([("weather", {"city": "Ulm"}), ("clock", {})]) for name in FORMATS}

ReadCalls = list[tuple[str, str]]
Read = tuple[str, str, ReadCalls]  # the reader's answer: reasoning, content, calls
Sample = tuple[str, str, ReadCalls]


def _samples(section: str) -> dict[str, list[Sample]]:
    samples = {
        name: [(text, content, [tuple(call) for call in calls]) for text, content, calls in rows]
        for name, rows in _DATA[section].items()
    }
    return samples | ({"mistral with args": samples["mistral"]} if "mistral" in samples else {})


WRITTEN, QUOTED, GOOD = _samples("written"), _samples("quoted"), _samples("good")
NO_CALLS: dict[str, list[str]] = _DATA["no_calls"]
BROKEN: list[str] = _DATA["bad"]


def calls_of(name: str, *, must: bool = False, many: bool = True) -> Calls:
    return Calls(FORMATS[name], [WEATHER, CLOCK], must, many)


@cache
def tokenizer_of(*marks: str) -> Tokenizer:
    """Return a tokenizer of bytes to which these marks are special tokens."""
    return byte_tokenizer(*marks)


@cache
def vocabulary_of(*marks: str) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer_of(*marks), tokenizer_of(*marks).vocab_size)


class AnswerGrammar:
    """The grammar of answers that `build` makes of the parts; the marks are special tokens of the model."""

    def __init__(self, marks: Sequence[str], *parts: Any, build: Callable[..., str] = grammar) -> None:
        self.tokenizer = tokenizer_of(*marks)
        ids = {mark: self.tokenizer.backend.token_to_id(mark) for mark in marks}
        self.matcher = LLMatcher(vocabulary_of(*marks).backend, build(ids, *parts))
        assert not self.matcher.is_error(), self.matcher.get_error()

    def verdict(self, text: str) -> str:
        """Return "accepted", "unfinished" if the text may go on, or the text up to which the grammar follows it."""
        followed, ids = self.matcher.deep_copy(), self.tokenizer.encode(text, False)
        num_taken = followed.try_consume_tokens(ids)
        if num_taken < len(ids):
            return self.tokenizer.decode(ids[:num_taken], skip_special_tokens=False)
        return "accepted" if followed.is_accepting() else "unfinished"

    def accepts(self, text: str) -> bool:
        return self.verdict(text) == "accepted"

    def refuses(self, text: str) -> bool:
        return self.verdict(text) not in ("accepted", "unfinished")


def read(
    pieces: Iterable[str], calls: Calls | None, thinking: Thinking | None = None, *, certain: bool = False
) -> Read:
    """Return everything that a reader makes of a text that comes in these pieces."""
    return read_with(AnswerReader(calls, thinking, is_certain=certain), pieces)


def read_with(reader: AnswerReader | HarmonyReader, pieces: Iterable[str]) -> Read:
    parts: list[Piece] = []
    text = ""
    for piece in pieces:
        text += piece
        parts += reader.feed(piece)
        reader.check()
        assert reader.is_certain or not reader.is_enforced or isinstance(reader, AnswerReader) or reader.channel is None
    parts += reader.finish()
    reader.check()
    for each in parts:
        assert not isinstance(each, Content) or each.text == text[each.end - len(each.text) : each.end], each
    return gathered(parts)


def gathered(pieces: Sequence[Piece]) -> Read:
    """Join the pieces by kind; calls must be numbered as they come, and have arguments only after their name."""
    calls: ReadCalls = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.call == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.call == len(calls) - 1 and piece.text
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            assert piece.text
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, Content)), calls
