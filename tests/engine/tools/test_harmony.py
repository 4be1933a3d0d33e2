"""gpt-oss's messages: read whole and in any pieces, and the grammars that hold a model to them."""

import itertools
import random

import pytest

from penstock.engine.grammar.tool_calls import messages_grammar
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.text.tools import formats, thinking
from penstock.engine.text.tools.call_kinds import Calls
from penstock.engine.text.tools.harmony import FORM, TOKENS, HarmonyReader, after_prompt
from penstock.engine.text.tools.reader import Arguments, CallStart
from penstock.engine.text.tools.scan import MAX_FRAME_CHARS
from tests.support.chat_samples import HARMONY
from tests.support.refusals import cases
from tests.support.tool_samples import CLOCK, SPECIAL, WEATHER, AnswerGrammar
from tests.support.tool_samples import read_with as read

THOUGHT = "<|channel|>analysis<|message|>The weather < of Ulm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
TO_FIRST = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}'
FINAL = "<|channel|>final<|message|>It rains."
CALLED = [("weather", '{"city": "Ulm"}')]


def calls(must: bool = False) -> Calls:
    return Calls(FORM, [WEATHER, CLOCK], must, many=False)


ANSWERS = dict(
    cases(__file__, "answers of gpt-oss", THOUGHT=THOUGHT, FINAL=FINAL, CALL=CALL, CALLED=CALLED, TO_FIRST=TO_FIRST)
)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("is_certain", [False, True])
def test_an_answer_is_the_same_however_it_is_cut(name: str, is_certain: bool) -> None:
    if is_certain and name in ("half of the arguments", "no arguments"):
        return
    text, expected = ANSWERS[name]
    rng = random.Random(1)
    start = after_prompt("… 2 + 2?<|end|><|start|>assistant")
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), min(len(text), rng.randint(0, 12)))) if text else []
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        reader = HarmonyReader(calls(), start, is_certain=is_certain)
        assert read(reader, pieces) == expected
        assert reader.has_called == bool(expected[2])
    assert read(HarmonyReader(calls(), start, is_certain=is_certain), list(text)) == expected


@pytest.mark.parametrize("length", [900, *range(1000, 1040), 1100])
def test_a_header_that_is_too_long_is_text_however_it_is_cut(length: int) -> None:
    text = f"<|channel|>analysis{' ' * length}<|message|>Ulm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    whole, *others = (
        read(HarmonyReader(None, after_prompt("<|start|>assistant"), is_certain=False), pieces)
        for pieces in ([text], list(text), [text[:1050], text[1050:]], [text[:1020], text[1020:1041], text[1041:]])
    )
    assert all(each == whole for each in others)
    assert (whole[0] == "Ulm.") == (length + len("<|channel|>analysis") <= MAX_FRAME_CHARS)


def test_arguments_stream_where_a_grammar_holds_the_model() -> None:
    reader = HarmonyReader(calls(must=True), after_prompt("<|start|>assistant"), is_certain=True)
    head, arguments = CALL.split("<|message|>")
    assert reader.feed(head) == [] and reader.feed("<|message|>") == [CallStart(0, "weather")]
    assert reader.feed('{"city"') == [Arguments(0, '{"city"')]
    assert not reader.has_called
    assert reader.feed(arguments[7:]) == [Arguments(0, arguments[7:])]
    assert reader.finish() == [] and reader.has_called


@pytest.mark.parametrize(("prompt", "text", "expected"), cases(__file__, "begun by the prompt"))
def test_a_begun_message_goes_on(prompt: str, text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert read(HarmonyReader(None, after_prompt(prompt), is_certain=False), [text]) == expected


def held(special: bool, tools: Calls | None, answer: StructuredOutputs | None = None) -> AnswerGrammar:
    return AnswerGrammar(TOKENS if special else (), tools, answer, build=messages_grammar)


@SPECIAL
def test_a_required_call_is_the_only_end(special: bool) -> None:
    must = held(special, calls(must=True))
    for text in (CALL, THOUGHT + CALL, THOUGHT + TO_FIRST, TO_FIRST):
        assert must.accepts(text)
    assert must.verdict(THOUGHT) == "unfinished"
    assert must.verdict(THOUGHT + FINAL) == THOUGHT + "<|channel|>"
    for right, wrong in (("functions.weather", "functions.wether"), ("functions.weather", "weather"), ('"Ulm"', "7")):
        assert must.refuses(CALL.replace(right, wrong))


@SPECIAL
def test_an_answer_has_its_form_in_the_final_channel_behind_reasoning(special: bool) -> None:
    answer = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    final = '<|channel|>final<|message|>{"a": 1}'
    for tools in (None, calls()):
        form = held(special, tools, answer)
        assert form.accepts(final) and form.accepts(THOUGHT + final) and form.refuses(THOUGHT + FINAL)
    assert form.accepts(THOUGHT + CALL)
    assert held(special, calls()).accepts(THOUGHT + FINAL)


def test_the_format_is_found_in_the_template_and_not_in_others() -> None:
    assert formats.detect(HARMONY, True, False) is FORM and thinking.detect(HARMONY) is thinking.HARMONY
    phi = "<|user|>{{ m }}<|end|>{{ tools }}"
    assert thinking.detect(phi) is None and formats.detect(phi, True, False) is None
