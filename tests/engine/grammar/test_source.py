"""From what is asked for to a grammar: what is accepted, what each form accepts, and what objections name."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.grammar.source import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.sampling_params import MAX_GRAMMAR_DEPTH, InvalidRequest, StructuredOutputs
from tests.support.fake_engine import byte_tokenizer
from tests.support.grammar_rig import accepts, matcher

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}}, "end": "</f>"},
        {"begin": "<f=now>", "schema": {"const": None}, "end": "</f>"},
        {"begin": "[", "schema": {"type": "integer"}, "end": "]"},
    ],
    "triggers": ["<f=", "["],
}
# form, what it accepts whole, what it does not
CORPUS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": PERSON},
        ['{"name": "Ann"}', '{"name":"Ann","age":3}', '{\n  "name": "Ann",\n  "age": 0\n}', '{"name": "é\\n\\""}'],
        ['{"age": 3}', '{"name": 3}', '{"name": "Ann", "age": -1}', '{"name": "Ann", "x": 1}', '{"name": "Ann"', "[]", ""],
    ),
    ({"json": json.dumps(PERSON)}, ['{"name": "Ann"}'], ['{"name": null}']),
    ({"json": True}, ["null", '{"a": [1, 2.5, "x", {}]}', "-3e5"], ["nul", "{a: 1}", "'x'"]),
    ({"json": {}}, ["true", "[]"], ["True"]),
    ({"json": {"enum": ["a", 2, None]}}, ['"a"', "2", "null"], ["a", "3"]),
    ({"json": {"type": ["string", "null"], "maxLength": 3}}, ['"abc"', "null"], ['"abcd"', "1"]),
    ({"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
     ["[true]", "[true, false]"], ["[]", "[true,false,true]", "[1]"]),
    ({"json": {"type": "integer", "minimum": -5, "maximum": 120}}, ["-5", "0", "120"], ["-6", "121", "1.5", "007"]),
    ({"json": {"type": "string", "pattern": "^[a-f]{2}$"}}, ['"ab"'], ['"abc"', '"xy"', "ab"]),
    ({"json": {"type": "string", "format": "date"}}, ['"2026-11-21"'], ['"2026-13-21"', '"today"']),
    ({"json": {"anyOf": [{"type": "integer"}, {"const": "none"}]}}, ["7", '"none"'], ['"some"']),
    (
        {"json": {"$defs": {"tree": {"type": "object", "properties": {"l": {"$ref": "#/$defs/tree"}},
         "additionalProperties": False}}, "$ref": "#/$defs/tree"}},
        ["{}", '{"l": {"l": {}}}'],
        ['{"r": {}}', '{"l": 1}'],
    ),
    ({"json_object": True}, ["{}", '{"any": ["thing"]}'], ["[]", "1", '"x"']),
    ({"regex": r"[a-z]+@[a-z]+\.(com|org)"}, ["me@here.org"], ["me@here", "Me@here.org", "me@here.orgx"]),
    ({"regex": "(a|b)*"}, ["", "abba"], ["abc"]),
    ({"choice": ["yes", "no", "yes, but"]}, ["yes", "no", "yes, but"], ["y", "yes,", "maybe", ""]),
    ({"choice": ['"quoted"', "back\\slash", "line\nbreak", "é😀"]}, ['"quoted"', "back\\slash", "line\nbreak", "é😀"], ["é"]),
    ({"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'}, ["1", "12+3+4"], ["1+", "+1", "a"]),
    ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", "()"]),
    (
        {"structural_tag": TAGS},
        ["just text", 'a <f=add>{"x": 1}</f> b', '<f=now>null</f>[12]<f=add>{}</f>', ""],
        ["a <f=sub>{}</f>", '<f=add>{"x": 3}</f>', "[x]", "[12"],
    ),
    ({"structural_tag": json.dumps(TAGS)}, ["[1]"], ["[1"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), CORPUS)
def test_a_form_accepts_its_answers_and_no_others(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(**form), text), text
    for text in bad:
        assert not accepts(matcher(**form), text), text


def test_whitespace_between_the_tokens_of_json_is_bounded() -> None:
    assert accepts(matcher(json=PERSON), '{\n\t"name": "Ann"\n}')
    assert not accepts(matcher(json=PERSON), '{  "name": "Ann"}')
    assert not accepts(matcher(json=PERSON), '{\n\n"name": "Ann"}')


@pytest.mark.parametrize(
    ("form", "field", "words"),
    [
        ({"json": False}, "structured_outputs.json", "accepts no answer"),
        ({"json": "{"}, "structured_outputs.json", "not valid JSON"),
        ({"json": "[1]"}, "structured_outputs.json", "list given; a JSON schema is an object, true or false"),
        ({"json": "3"}, "structured_outputs.json", "int given"),
        ({"json": "[" * 200 + "]" * 200}, "structured_outputs.json", f"more than {MAX_GRAMMAR_DEPTH} deep"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "deep"),
        ({"grammar": "root ::= [a-z]"}, "structured_outputs.grammar", "Lark grammar"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structured_outputs.structural_tag", "0 structures"),
        ({"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["b"]}}, "structured_outputs.structural_tag",
         r"structures\[0\].begin starts with none"),
        ({"structural_tag": {"structures": [{"begn": "a"}], "triggers": []}}, "structured_outputs.structural_tag", "begn"),
        ({"structural_tag": "[]"}, "structured_outputs.structural_tag", "object"),
    ],
)  # fmt: skip
def test_an_objection_names_the_field_and_says_what_is_wrong(form: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_source(StructuredOutputs(**form))
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_source(StructuredOutputs(**form), field="response_format.json_schema.schema")
    assert caught.value.field == "response_format.json_schema.schema"


def test_a_trigger_that_is_a_special_token_is_that_token_and_not_its_letters() -> None:
    tag = {"structures": [{"begin": "<|call|>f", "schema": {"type": "integer"}}], "triggers": ["<|call|>"]}
    wanted = StructuredOutputs(structural_tag=tag)
    assert '"<|call|>"' in grammar_source(wanted)
    assert "TEXT <[7]> (tag_0_0)" in grammar_source(wanted, {"<|call|>": 7}).replace("\\", "")


@pytest.mark.parametrize("trigger", ["[TOOL_CALLS]", "<|x y|>", "<|call|>", "<call>"])
def test_a_trigger_that_is_a_special_token_may_be_written_in_any_way(trigger: str) -> None:
    tokenizer = byte_tokenizer(trigger)
    tag = {"structures": [{"begin": f"{trigger}f", "schema": {"type": "integer"}, "end": ";"}], "triggers": [trigger]}
    source = grammar_source(StructuredOutputs(structural_tag=tag), tokenizer.special_texts)
    matcher = LLMatcher(GrammarVocabulary.of(tokenizer, tokenizer.vocab_size).backend, source)
    for text, is_right in ((f"text {trigger}f12; more", True), (f"{trigger}g", False)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.special_texts[trigger] in ids
        assert (matcher.validate_tokens(ids) == len(ids)) == is_right
