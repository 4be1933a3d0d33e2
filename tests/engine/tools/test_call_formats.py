"""Calls in every format, as the templates of models write them: read at once and in pieces, forced and free."""

import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.text.tools.answer_reader import AnswerReader
from penstock.engine.text.tools.arguments import kinds, typed
from penstock.engine.text.tools.call_kinds import Calls, NamedCalls, ToolSpec
from penstock.engine.text.tools.reader import Arguments, CallStart
from penstock.engine.text.tools.thinking import GEMMA, IMPLIED, SEED, THINK, Marks, Thinking
from tests.support.call_writers import FORMS, PRINTED, WRITERS, Call
from tests.support.refusals import cases, hardest, hardest_rows
from tests.support.tool_samples import CERTAIN, CLOCK, FORMATS, SPECIAL, AnswerGrammar, read

DATA = json.loads(Path(__file__).with_name("calls.json").read_text())
TRIP, TREE = (ToolSpec(name, DATA[name]) for name in ("trip", "tree"))
FREE = ToolSpec("free", {"type": "object"})
TOOLS = [TRIP, TREE, FREE, CLOCK]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
SAMPLE, SHORT, WRONG = ([tuple(call) for call in DATA[key]] for key in ("sample", "short", "wrong calls"))
MISLEADING: list[str] = DATA["misleading"]  # pieces of calls that a random answer writes where no grammar expects them
UNKNOWN: Call = ("tides", {"city": "a", "days": 1})
BY_FORMAT = pytest.mark.parametrize("name", WRITERS)
NAMED = [name for name, form in FORMS.items() if isinstance(form, NamedCalls)]
# Formats whose optional calls a grammar holds, since they begin with a mark. A call without one may be an example.
HELD = [*(name for name, form in FORMATS.items() if form.triggers), *NAMED]
NEW = pytest.mark.parametrize("name", NAMED)
SPELLED = [name for name in NAMED if FORMS[name].parameters is not None]
KINDS = ("hermes", "deepseek_v3", "qwen3_coder", "glm45", "minimax_m2", "gemma4", "lfm2")  # one format of each kind


def calls_for(name: str, *, must: bool = False, tools: list[ToolSpec] = TOOLS) -> Calls:
    return Calls(FORMS[name], tools, must, FORMS[name].has_many or not must)


def called(calls: list[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", hardest(WRITERS, *KINDS))
@CERTAIN
def test_every_cut_gives_the_same(name: str, certain: bool) -> None:
    broken = WRITERS[name]([("trip", {"city": "é <\n{x", "far": True, "tags": ["a, b"]})])
    middle = len(broken) * 2 // 3
    for text in (
        "Well.\n\n" + WRITERS[name](SHORT) + " Done.",
        broken[:middle],
        broken[:middle] + "<" + broken[middle + 3 :],
        "\n".join(FORMS[name].marks) + broken,
    ):
        whole = read([text], calls_for(name), certain=certain)
        assert read(list(text), calls_for(name), certain=certain) == whole
        for at in range(1, len(text)):
            assert read([text[:at], text[at:]], calls_for(name), certain=certain) == whole, at


@BY_FORMAT
@pytest.mark.parametrize("marks", [THINK, SEED, GEMMA, IMPLIED], ids=["think", "seed", "gemma", "implied"])
def test_calls_behind_reasoning_are_read_however_it_begins(name: str, marks: Marks) -> None:
    text = f"Hm, {FORMS[name].marks[0]}?\n{marks.close}\n\n{WRITERS[name](SHORT[:2])}"
    ways = [(Thinking(marks, is_open=True), text), (Thinking(marks), marks.open + "\n" + text)]
    for thinking, written in ways + [(Thinking(marks), text)] * marks.is_implied:
        for pieces in ([written], list(written)):
            reasoning, content, calls = read(pieces, calls_for(name), thinking)
            assert (reasoning, content, called(calls)) == (f"Hm, {FORMS[name].marks[0]}?", "", SHORT[:2])


def test_an_answer_without_reasoning_is_text_where_the_prompt_closed_it() -> None:
    assert read(["Hello"], None, Thinking(IMPLIED, is_over=True)) == ("", "Hello", [])
    assert read(["Hello"], None, Thinking(IMPLIED)) == ("Hello", "", [])


def value(choose: random.Random, schema: dict[str, Any]) -> Any:
    kind = choose.choice(schema["type"]) if isinstance(schema["type"], list) else schema["type"]
    if kind == "array":
        return [value(choose, schema["items"]) for _ in range(choose.randint(0, 3))]
    if kind == "object":
        return {key: value(choose, inner) for key, inner in schema["properties"].items() if choose.random() < 0.8}
    text = "".join(choose.choices("ab \n\"'\\{}[]()<>,:=/&é🏔\t", k=choose.randint(0, 12)))
    numbers = {"integer": choose.randint(-(10**12), 10**12), "number": choose.choice([0.5, -1e-7, 3, 1.25e20])}
    return {"string": text, "boolean": choose.random() < 0.5, "null": None, **numbers}[kind]


def schema_at_random(choose: random.Random, depth: int) -> dict[str, Any]:
    scalars = ["string", "integer", "number", "boolean", ["integer", "null"], "string"]
    kind = choose.choice([*scalars, *(["array", "object"] * depth)])
    if kind == "array":
        return {"type": "array", "items": schema_at_random(choose, depth - 1)}
    if kind == "object":
        return object_at_random(choose, depth - 1, [f"k{n}" for n in range(choose.randint(0, 3))])
    return {"type": kind}


def object_at_random(choose: random.Random, depth: int, names: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema_at_random(choose, depth) for name in names}}


@pytest.mark.parametrize(("name", "write"), [*WRITERS.items(), ("lfm2", PRINTED)])
def test_random_calls_come_back_as_they_were_written(name: str, write: Callable[[Sequence[Call]], str]) -> None:
    choose = random.Random(name)
    for _ in range(15):
        tools, calls = [], []
        for number in range(choose.randint(1, 3)):
            parameters = object_at_random(choose, 2, ["p_0", "p_1", "p_2", "p_3"])
            tools.append(ToolSpec(f"f{number}", parameters))
            calls.append((f"f{number}", value(choose, parameters)))
        calls = calls[: None if FORMS[name].has_many else 1]
        text = write(calls)
        places = [0, *accumulate(choose.choices(range(1, 9), k=len(text))), len(text)]
        for certain in (False, True):
            for pieces in ([text], [text[a:b] for a, b in pairwise(places)]):
                _, content, read_calls = read(pieces, calls_for(name, tools=tools), certain=certain)
                assert (called(read_calls), content.strip()) == (calls, ""), text


def grammar_of(name: str, special: bool, *parts: Any) -> AnswerGrammar:
    return AnswerGrammar((*FORMS[name].tokens, THINK.open, THINK.close) if special else (), *parts)


# The marks of a model's reasoning, and the text that it has written before the answer.
THOUGHTS: dict[str, tuple[Thinking | None, str]] = dict(cases(__file__, "thoughts", Thinking=Thinking, THINK=THINK))
ROWS = [(name, thought) for name in WRITERS for thought in THOUGHTS]
FAST_ROWS = [(name, thought) for name, thought in ROWS if thought == "none" or name in FORMATS]
BY_THOUGHT = pytest.mark.parametrize(("name", "thought"), hardest_rows(ROWS, FAST_ROWS))


@SPECIAL
@BY_THOUGHT
def test_required_calls_of_the_template_are_the_only_answer(name: str, special: bool, thought: str) -> None:
    write, many, (thinking, before) = WRITERS[name], FORMS[name].has_many, THOUGHTS[thought]
    held = grammar_of(name, special, calls_for(name, must=True), None, thinking)
    for calls in [[call] for call in SAMPLE] + [SAMPLE] * many:
        text = before + write(calls)
        assert held.accepts(text), text
        _, content, read_calls = read([text], calls_for(name), thinking, certain=True)
        assert (content, called(read_calls)) == ("", calls)
    call = write(SAMPLE[:1])
    wrong = ["hello", f"hello {call}", f"{call} and", *(write([each]) for each in [*WRONG, UNKNOWN])]
    wrong += [write(SAMPLE[:2])] * (not many)
    if name in FORMATS:
        wrong += [write([("clock", {})]).replace("{}", "null"), call.replace(": {", ":  {")]
    for text in wrong:
        assert held.refuses(before + text), text


@SPECIAL
@BY_THOUGHT
@pytest.mark.parametrize("many", [False, True])
def test_text_is_free_until_a_call_begins(name: str, special: bool, thought: str, many: bool) -> None:
    write, many, (thinking, before) = WRITERS[name], many and FORMS[name].has_many, THOUGHTS[thought]
    held = grammar_of(name, special, Calls(FORMS[name], TOOLS, False, many), None, thinking)
    call, lead = write(SAMPLE[:1]), "<|python_tag|>" if name == "llama3_json" else ""
    right = ["", "hello, <tool> {} [1]", '{"name": "Bob", "parameters": {}}', lead + call, f"hello\n{lead}{call}"]
    wrong = [f"hello {lead}{write([each])}" for each in WRONG]
    (right if many else wrong).extend([write(SAMPLE[:2]), f"{call}\nand {call}", f"{call} done"])
    # Behind a mark there is a call of one of the functions; without a mark it may be an example.
    (wrong if FORMS[name].triggers else right).append(f"hello {lead}{write([UNKNOWN])}")
    for text in [*right, *(write([each]) for each in SAMPLE)]:
        assert held.accepts(before + text), text
    for text in [*wrong, *(write([each]) for each in WRONG)]:
        assert held.refuses(before + text), text
    assert thinking is None or held.verdict(before.partition("</think>")[0] or "<think>") == "unfinished"


@pytest.mark.parametrize("name", hardest(HELD, *KINDS, "mistral with args"))
@pytest.mark.parametrize("must", [False, True], ids=["may", "must"])
def test_calls_in_a_text_that_a_grammar_allows_keep_to_their_schemas(name: str, must: bool) -> None:
    """Follow the grammar at random, through words of a call in their order and misleading ones out of order.

    The reader takes nothing for a call that the grammar took for free text, and its knowing of the grammar makes no difference.
    """
    words = re.findall(r"<[^<>]+>|[a-z_]+|[^a-z<>\s]+|\s+|.", WRITERS[name](SAMPLE))
    others = [*words, *MISLEADING] if name in FORMATS else words
    held, num_called = grammar_of(name, False, calls_for(name, must=must)), 0
    for seed in range(20 if name in FORMATS else 4):
        followed, choose, at, text = held.matcher.deep_copy(), random.Random(seed), 0, b""
        while len(text) < 500 and not (text and followed.is_accepting() and (must or choose.random() < 0.05)):
            is_next = choose.random() < 0.85 and at < len(words)
            piece = (words[at] if is_next else choose.choice(others)).encode()
            at += is_next
            if followed.validate_tokens([*piece]) < len(piece):
                bias = followed.compute_logit_bias()
                allowed = [byte for byte in range(256) if bias[byte] and (byte < 127 or not bias[32])]
                piece = bytes([choose.choice(allowed)])
            assert followed.consume_tokens([*piece])
            text += piece
        if not followed.is_accepting():
            continue
        answer = text.decode(errors="replace")
        _, content, calls = read([answer], calls_for(name, must=must), certain=True)
        num_called += len(calls)
        assert not must or (calls and not content.strip()), answer
        # A number beyond a double is no call where nothing is held.
        if not re.search(r"\d[eE]\+?\d\d", answer):
            assert read([answer], calls_for(name, must=must), certain=False)[1:] == (content, calls), answer
        for function, arguments in called(calls):
            jsonschema.validate(arguments, SCHEMAS[function])
    assert num_called


@NEW
def test_arguments_stream_while_a_long_text_is_still_written(name: str) -> None:
    reader = AnswerReader(calls_for(name), None, is_certain=True)
    text = WRITERS[name]([("trip", {"city": "x" * 1000, "days": 1})])
    pieces = [reader.feed(text[at : at + 4]) for at in range(0, len(text), 4)]
    assert sum(isinstance(piece, CallStart) for each in pieces for piece in each) == 1
    assert sum(any(isinstance(piece, Arguments) for piece in each) for each in pieces) > 240


@pytest.mark.parametrize("name", [name for name in HELD if name != "llama3_json"])  # its calls may lack the mark
def test_a_call_that_is_cut_off_is_kept_where_a_grammar_holds_it(name: str) -> None:
    text = WRITERS[name]([("trip", {"city": "Ulm", "days": 1})])
    cut = text[: text.index("Ulm") + 2]
    assert read([cut], calls_for(name)) == ("", cut, [])
    assert read([cut], calls_for(name), certain=True) == ("", "", [("trip", '{"city": "Ul')])


@NEW
def test_a_call_is_enforced_from_its_opening_to_its_closing_mark_only(name: str) -> None:
    """Stop strings apply where no call is enforced."""
    reader, call = AnswerReader(calls_for(name), None, is_certain=True), WRITERS[name]([("trip", {"city": "Ulm"})])
    for text, is_enforced in (
        ("so\n\n", False),
        (call[: call.index("Ulm")], True),
        (call[call.index("Ulm") : -1], True),
    ):
        reader.feed(text)
        assert reader.is_enforced is is_enforced, text
    reader.feed(call[-1])
    assert not reader.is_enforced


@BY_FORMAT
def test_no_text_of_required_calls_is_content_wherever_they_are_cut_off(name: str) -> None:
    calls = [("trip", {"city": "Ulm", "days": 1})] * (2 if FORMS[name].has_many else 1)
    text = WRITERS[name](calls)
    for end in range(1, len(text)):
        assert read([text[:end]], calls_for(name, must=True), certain=True)[1] == "", end


@NEW
@pytest.mark.parametrize("unit", ["<", "{", "[", "'", '"', "\\", " ", "\n", "a", "a ", ",", ":", "="])
def test_a_hostile_text_of_any_length_comes_back_whole(name: str, unit: str) -> None:
    text = WRITERS[name]([("trip", {"city": "Ulm", "days": 1})])
    head = text[: text.index("Ulm")]
    for begun in (head, head.partition("trip")[0], head + "Ulm" + text.partition("Ulm")[2].partition("days")[0]):
        whole = begun + unit * (6_000 // len(unit))
        content = read([whole[at : at + 50] for at in range(0, len(whole), 50)], calls_for(name))[1]
        assert content == read([whole], calls_for(name))[1]


@pytest.mark.parametrize(("text", "schema", "meant"), cases(__file__, "meanings"))
def test_the_schema_decides_the_meaning_of_a_text(text: str, schema: dict[str, Any], meant: Any) -> None:
    back = {"$ref": "#/$defs/round"}  # 64 levels of two ways each, if it were followed every time
    root = {"$defs": {"list": {"type": "array"}, "round": {"anyOf": [back, back, {"type": "integer"}]}}}
    assert json.loads(typed(text, kinds(schema, root))) == meant


BEYOND_A_GRAMMAR = [(name, *row) for name in SPELLED for row in cases(__file__, "schemas beyond a grammar")]
LIST_OF_ITEMS = {"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}}


@pytest.mark.parametrize(
    ("name", "parameters", "reason", "arguments"),
    [*BEYOND_A_GRAMMAR, ("gemma4", LIST_OF_ITEMS, "items: a list", {"a": [1]})],
)
def test_a_schema_that_a_format_cannot_hold_is_refused_only_if_it_is_strict(
    name: str, parameters: dict[str, Any], reason: str, arguments: dict[str, Any]
) -> None:
    tool = ToolSpec("f", parameters)
    with pytest.raises(InvalidRequest, match=f"tools: f: {reason}: calls of {FORMS[name].name} are not held to that"):
        grammar_of(name, False, calls_for(name, must=True, tools=[tool]))
    loose = grammar_of(name, False, calls_for(name, must=True, tools=[tool._replace(is_strict=False)]))
    assert loose.accepts(WRITERS[name]([("f", arguments)]))


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize(("parameters", "reason"), cases(__file__, "schemas without a grammar"))
def test_an_invalid_or_too_large_schema_is_refused_even_if_not_strict(name: str, parameters: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tools: {reason}"):
        grammar_of(name, False, calls_for(name, tools=[ToolSpec("f", parameters, is_strict=False)]))


@pytest.mark.parametrize(("name", "text", "calls"), json.loads(Path(__file__).with_name("habits.json").read_text()))
def test_habits_of_models_are_read_and_other_texts_are_content(name: str, text: str, calls: list[list[Any]]) -> None:
    for pieces in ([text], list(text)):
        _, content, read_calls = read(pieces, calls_for(name))
        assert called(read_calls) == [tuple(call) for call in calls]
        assert content == ("" if calls else text)


@pytest.mark.parametrize("name", hardest(WRITERS, *KINDS))
@pytest.mark.parametrize(("parameters", "right", "wrong"), cases(__file__, "schemas with references"))
def test_a_schema_is_enforced_wherever_its_references_lead(name: str, parameters: Any, right: Any, wrong: Any) -> None:
    calls = calls_for(name, must=True, tools=[ToolSpec("f", parameters)])
    held = grammar_of(name, False, calls)
    assert held.accepts(WRITERS[name]([("f", right)])) and not held.accepts(WRITERS[name]([("f", wrong)]))
    assert called(read([WRITERS[name]([("f", right)])], calls, certain=True)[2]) == [("f", right)]


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder", "seed_oss"])
@pytest.mark.parametrize("length", [255, 256, 257, 600])
@pytest.mark.parametrize("certain", [False, True])
def test_a_key_that_is_too_long_makes_no_call_however_it_is_cut(name: str, length: int, certain: bool) -> None:
    function = ToolSpec("weather", {"type": "object"})
    text = WRITERS[name]([("weather", {"k" * length: 1})])
    calls = Calls(FORMS[name], [function], certain, many=True)
    whole, pieces = (read(cut, calls, certain=certain) for cut in ([text], list(text)))
    assert whole == pieces and (whole[2] == [("weather", f'{{"{"k" * length}": 1}}')]) == (length < 256)
