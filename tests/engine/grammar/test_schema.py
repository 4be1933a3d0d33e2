"""JSON schemas: what their grammars accept, and which schemas are refused with which reason."""

import json
import random
from typing import Any

import jsonschema
import pytest

from penstock.engine.grammar.compiler import GrammarRefused
from penstock.engine.grammar.json_schema import prepared
from penstock.engine.grammar.source import grammar_source
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from tests.support.grammar_rig import COMPILER, accepts, matcher

ABC = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "cc": {}}}
CLOSED = {**ABC, "additionalProperties": False}
KINDS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}, kind: {}}, "required": ["kind"]}
    for kind in ("cat", "dog")
}
KEYWORDS = [
    "type",
    "enum",
    "const",
    "format",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "multipleOf",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "$ref",
    "$defs",
    "$id",
    "$anchor",
]
ODD_VALUES: list[Any] = [
    *(None, True, 1.5, -1, "a[", "http://[", [], [3, None], [{"a": []}], {}, {"a": 3}, {"type": [[]]}, [["a"]]),
]
# schema, what it holds, what it does not
HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # names spelled with \u
    ({"properties": {"a": {"type": "integer"}}, "type": "object"}, ['{"a": 1}'], ['{"a":1,"\\u0061":"x"}', '{"\\u0061":1}']),
    # formats
    ({"format": "date", "type": "string"}, ['"2020-02-29"', '"1999-12-31"'], ['"2021-04-31"', '"2021-13-01"', '"2021-1-01"']),
    ({"format": "time", "type": "string"}, ['"23:59:59Z"', '"01:02:03.5+01:00"'], ['"24:00:00Z"', '"12:00:00"']),
    ({"format": "date-time", "type": "string"}, ['"2020-02-29T01:02:03Z"'], ['"2021-02-30T01:02:03Z"', '"2021-02-03"']),
    ({"format": "hostname", "type": "string"}, ['"a.b-c.de"', '"a"'], ['"-a"', f'"{"a" * 64}"']),
    ({"format": "date", "pattern": "^2", "type": "string"}, ['"2020-02-28"'], ['"1999-01-01"', '"2"']),
    ({"format": "postal-code", "type": "string"}, ['"x"'], ["1"]),
    ({"format": ["odd"], "type": "string"}, ['"x"'], ["1"]),
    # patterns, in ECMA's meaning
    ({"pattern": r"^\d\w$", "type": "string"}, ['"1a"', '"0_"'], ['"٣a"', '"1é"']),
    ({"pattern": r"^\S$", "type": "string"}, ['"a"', '"é"', '"\x85"'], ['"\ufeff"', '" "']),
    ({"pattern": "^.$", "type": "string"}, ['"a"', '"\\t"'], ['"\\r"', '"\u2028"', '"\\n"']),
    ({"pattern": r"^[\s\d]$", "type": "string"}, ['"\u2003"', '"7"', '"\ufeff"'], ['"٣"', '"x"', '"\x85"']),
    ({"pattern": r"^[^\S]$", "type": "string"}, ['" "', '"\ufeff"'], ['"\x85"', '"a"']),
    ({"pattern": r"^[^\s]$", "type": "string"}, ['"a"', '"\x85"'], ['"\ufeff"', '" "']),
    ({"pattern": r"^[[a&&~~]+$", "type": "string"}, ['"[&a"'], ['"d"']),
    ({"pattern": r"^[+--]$", "type": "string"}, ['"+"', '","', '"-"'], ['"a"']),
    ({"pattern": r"^[^a&&b]$", "type": "string"}, ['"c"'], ['"a"', '"&"', '"b"']),
    ({"pattern": r"^\x41\u0042\/\-[^]$", "type": "string"}, ['"AB/-x"'], ['"AB/-"']),
    ({"type": "object", "patternProperties": {r"^\S$": {"type": "integer"}}, "additionalProperties": False},
     ['{"a": 1}'], ['{"\ufeff": 1}', '{"a": "x"}']),
    # characters that JSON writes as \u only
    ({"enum": ["a\x01b", "c"]}, ['"c"'], ['"ab"']),
    ({"pattern": "^[\\x00-\\x7f]$", "type": "string"}, ['"c"'], ['""', '"é"']),
    ({"pattern": "^[^\\x00-\\x1f]$", "type": "string"}, ['"c"'], ['""', '"\\n"']),
    # counts of properties
    ({**ABC, "minProperties": 1, "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a":1,"x":1}'], ['{"a":1}', '{"a":1,"a":1}']),
    # llguidance's options in a user's schema, and properties that are called so
    ({"x-guidance": {"lenient": True, "whitespace_pattern": "x*"}, "type": "array"}, ["[]"], ["1"]),
    ({"type": "object", "properties": {"x-guidance": {"type": "integer"}}}, ['{"x-guidance": 3}'], ['{"x-guidance": "a"}']),
    ({"enum": [{"x-guidance": 1}]}, ['{"x-guidance": 1}'], ["{}"]),
    # what says nothing
    ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
    ({"default": {"$ref": 3}, "examples": [{"not": 1}], "type": "integer"}, ["1"], ["[]"]),
    # references
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, ['{"next": {"next": {}}}'], ['{"next": 1}']),
    ({"type": "object", "properties": {"x": {"$ref": "#/other/y"}}, "other": {"y": {"pattern": r"^\S$", "type": "string"}}},
     ['{"x": "a"}'], ['{"x": "\ufeff"}', '{"x": 1}']),
    ({"$id": "http://a.b/c.json", "type": "object", "properties": {"x": {"$ref": "d.json"}, "y": {"$ref": "#e"}},
      "$defs": {"d": {"$id": "d.json", "type": "null"}, "e": {"$anchor": "e", "enum": [1]}}},
     ['{"x": null, "y": 1}'], ['{"x": 1}', '{"y": 2}']),
    # schemas that exclude each other
    ({"$defs": KINDS, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}, ['{"kind": "dog"}'], ['{"kind": "cow"}', "1"]),
    ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}, {"enum": [True]}]}, ["1", "null", "true"], ["2.5", "false"]),
    ({"oneOf": [{**CLOSED, "required": ["a"]}, {"type": "array"}]}, ['{"a": 1}', "[]"], ["{}", "1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_holds_what_it_says(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(json=schema), text), text
    for text in bad:
        assert not accepts(matcher(json=schema), text), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, 'Unimplemented keys: ["not"]'),
        ({"items": {"uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"if": {"type": "null"}, "then": False}, 'Unimplemented keys: ["if", "then"]'),
        ({**ABC, "minProperties": 1}, "min/maxProperties only supported when"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "two schemas of a oneOf can"),
        ({"$ref": "http://json-schema.org/draft-07/schema#/x"}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "(?=x)"}}}, "regex parse error"),
        ({"items": {"type": "dict"}}, "Invalid type: dict"),
        ({"items": 3}, "schema must be an object or boolean"),
        ({"enum": [1 << 70]}, ""),
        ({"const": "\0"}, "const: no value can be written without a control character"),
        ({"pattern": "^a\\u0001b$"}, "pattern '^a\\\\u0001b$': a control character"),
        ({"patternProperties": {"[\\x02]": True}}, "pattern '[\\\\x02]': a control character"),
    ],
)
def test_a_schema_that_no_grammar_holds_is_refused_with_our_field_and_the_reason(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises((InvalidRequest, GrammarRefused)) as caught:
        COMPILER.wait(grammar_source(StructuredOutputs(json=schema), field="some.field"))
    assert str(caught.value).removeprefix("some.field: ").startswith(reason)
    assert prepared(schema, "", lenient=True) is not None


def test_a_one_of_that_is_not_held_exactly_is_taken_for_any_of_where_the_user_says_so() -> None:
    number = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    with pytest.raises(GrammarRefused, match=r".* oneOf .* structured_outputs.coerce_one_of"):
        COMPILER.wait(grammar_source(StructuredOutputs(json=number)))
    tag = {"structures": [{"begin": "<", "schema": number, "end": ">"}], "triggers": ["<"]}
    for found, before, after in (
        (matcher(json=number, coerce_one_of=True), "", ""),
        (matcher(structural_tag=tag, coerce_one_of=True), "so <", ">"),
    ):
        assert accepts(found, f"{before}1.5{after}")
    assert not accepts(matcher(json=number, coerce_one_of=True), '"a"')
    with pytest.raises(InvalidRequest, match="structured_outputs.coerce_one_of: regex holds no oneOf"):
        matcher(regex="a", coerce_one_of=True)


@pytest.mark.parametrize(
    "schema",
    [{"enum": []}, {"enum": [1], "type": "string"}, {"required": ["a"], "properties": {"a": False}, "type": "object"}],
)
def test_a_schema_that_nothing_keeps_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises((GrammarRefused, InvalidRequest)):
        matcher(json=schema)


@pytest.mark.parametrize("pattern", [r"\b", r"(a)\1", "a(?!b)", "a(?<=b)", "[b-a]", "[a", "a\\", r"\k<a>", r"\ud800"])
def test_a_pattern_that_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises((GrammarRefused, InvalidRequest)):
        matcher(json={"type": "string", "pattern": pattern})


def test_a_keyword_of_any_shape_is_taken_or_refused_but_breaks_nothing() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        inner = {rng.choice(KEYWORDS): rng.choice(ODD_VALUES) for _ in range(3)}
        schema = {**inner, rng.choice(KEYWORDS): rng.choice([inner, [inner, inner], {"a": inner}])}
        for lenient in (False, True):
            try:
                prepared(schema, "field", lenient)
            except InvalidRequest:
                assert not lenient, schema


def test_the_examples_are_right_by_an_independent_validator() -> None:
    checker = jsonschema.FormatChecker(["date"])
    for schema, good, bad in HELD:
        if "attern" in json.dumps(schema) or isinstance(schema.get("format"), list):  # it knows Python's patterns only
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for text in good:
            assert validator.is_valid(json.loads(text)), (schema, text)
        bad = [text for text in bad if text == json.dumps(json.loads(text))] if not schema.get("format") else []
        assert not any(map(validator.is_valid, map(json.loads, bad))), schema
