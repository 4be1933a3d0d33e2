"""What becomes of a schema before llguidance sees it: what is accepted then, what is refused and where."""

import json
import random
from typing import Any

import jsonschema
import pytest

from penstock.engine.grammar.compiler import GrammarRefused
from penstock.engine.grammar.ecma import translated
from penstock.engine.grammar.json_schema import lark_json, prepared
from penstock.engine.grammar.keywords import COUNTS, LISTS, OBJECTS, PLAIN, REWRITTEN
from penstock.engine.grammar.opposites import ONE
from penstock.engine.grammar.source import grammar_source
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from tests.support.grammar_rig import accepts, matcher

ABC = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "cc": {}}}
CLOSED = {**ABC, "additionalProperties": False}
KINDS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}, kind: {}}, "required": ["kind"]}
    for kind in ("cat", "dog")
}
_OF_ALL = [*COUNTS, *LISTS, *OBJECTS, *REWRITTEN, *ONE, *PLAIN, "pattern"]
# schema, what it holds, what it does not
HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # names spelled with \u
    ({"properties": {"a": {"type": "integer"}}, "type": "object"}, ['{"a": 1}'], ['{"a":1,"\\u0061":"x"}', '{"\\u0061":1}']),
    # formats
    ({"format": "date", "type": "string"}, ['"2020-02-29"', '"2000-02-29"', '"0004-02-29"', '"1999-12-31"'],
     ['"2021-02-29"', '"1900-02-29"', '"0000-01-01"', '"2021-04-31"', '"2021-1-01"']),
    ({"format": "time", "type": "string"}, ['"23:59:59Z"', '"01:02:03.5+01:00"'], ['"12:00:60Z"', '"24:00:00Z"', '"12:00:00"']),
    ({"format": "date-time", "type": "string"}, ['"2020-02-29T01:02:03Z"'], ['"2021-02-29T01:02:03Z"', '"2020-02-29T01:02:60Z"']),
    ({"format": "hostname", "type": "string"}, ['"a.b-c.de"', '"a"'],
     ['"xn--X"', '"a.xn--x"', f'"{"a." * 130}b"', f'"{"a" * 64}"']),
    ({"format": "date", "pattern": "^2", "type": "string"}, ['"2020-02-28"'], ['"1999-01-01"', '"2"']),
    ({"format": "postal-code", "type": "string"}, ['"x"'], ["1"]),
    ({"format": "json-pointer", "type": "string"}, ['"/a~0/b"', '""'], ['"a"', '"/~2"']),
    # patterns, in ECMA's meaning
    ({"pattern": r"^\S$", "type": "string"}, ['"a"', '"é"'], ['"\ufeff"', '" "', '"\x85"']),
    ({"pattern": "^.$", "type": "string"}, ['"a"', '"\\t"'], ['"\\r"', '"\u2028"', '"\\n"']),
    ({"pattern": r"^[\s\d]$", "type": "string"}, ['"\u2003"', '"7"'], ['"٣"', '"x"', '"\ufeff"', '"\x85"']),
    ({"pattern": r"^[^\S]$", "type": "string"}, ['" "'], ['"\ufeff"', '"a"']),
    ({"pattern": r"^[^\s]$", "type": "string"}, ['"a"'], ['"\ufeff"', '"\x85"', '" "']),
    ({"pattern": r"^[[a&&~~]+$", "type": "string"}, ['"[&a"'], ['"d"']),
    ({"pattern": r"^\cI\x41\u0042\u{43}\ud83d\ude00\/\-$", "type": "string"}, ['"\\tABC😀/-"'], ['"ABC"']),
    ({"pattern": "^{a}[^]$", "type": "string"}, ['"{a}x"'], ['"a"']),
    ({"type": "object", "patternProperties": {r"^\S$": {"type": "integer"}}, "additionalProperties": False},
     ['{"a": 1}'], ['{"\ufeff": 1}', '{"a": "x"}']),
    # characters that JSON writes as \u only
    ({"enum": ["a\x01b", "c"]}, ['"c"'], ['"ab"']),
    ({"pattern": "^(a\\u0001b|[\\x02]d|c)$", "type": "string"}, ['"c"'], ['"ab"', '"d"']),
    # counts of properties: one may have the name of another
    ({**ABC, "minProperties": 1, "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    ({**CLOSED, "minProperties": 1}, ['{"cc": 1}'], ["{}"]),
    ({**ABC, "minProperties": 1}, ['{"cc": 1}', '{"a": 1, "x": 1}', '{"x": 1}', '{"b":1,"cc":1}'], ["{}", '{"a": "x"}']),
    ({**ABC, "minProperties": 3, "required": ["a", "z"]}, ['{"a":1,"z":1,"x":1}', '{"a":1,"b":1,"z":1}'],
     ['{"a":1,"z":1}', '{"a":1,"z":1,"z":1}']),
    ({**CLOSED, "patternProperties": {"^[ax]": {}}, "minProperties": 1}, ['{"a": 1}', '{"x": 1}'],
     ["{}", '{"a": "x"}', '{"y": 1}']),
    ({**CLOSED, "minProperties": 3}, ['{"a": 1, "b": 1, "cc": 1}'], ['{"a": 1, "b": 1}', '{"a": 1, "a": 1, "a": 1}']),
    ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a":1,"x":1}'], ['{"a":1}', '{"a":1,"a":1}']),
    # llguidance's options in a user's schema, and properties that are called so
    ({"x-guidance": {"lenient": True, "whitespace_pattern": "x*"}, "type": "array"}, ["[]"], ["1"]),
    ({"type": "object", "properties": {"x-guidance": {"type": "integer"}}}, ['{"x-guidance": 3}'], ['{"x-guidance": "a"}']),
    ({"enum": [{"x-guidance": 1}]}, ['{"x-guidance": 1}'], ["{}"]),
    # what says nothing
    ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
    ({"default": {"$ref": 3}, "examples": [{"not": 1}], "type": "integer"}, ["1"], ["[]"]),
    ({"then": {"not": 1}, "minContains": 3, "type": "integer"}, ["1"], ['""']),
    # references
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, ['{"next": {"next": {}}}'], ['{"next": 1}']),
    ({"type": "object", "properties": {"x": {"$ref": "#/other/y"}}, "other": {"y": {"pattern": r"^\S$", "type": "string"}}},
     ['{"x": "a"}'], ['{"x": "\ufeff"}', '{"x": 1}']),
    ({"$id": "http://a.b/c.json", "type": "object", "properties": {"x": {"$ref": "d.json"}, "y": {"$ref": "#e"}},
      "$defs": {"d": {"$id": "d.json", "type": "null"}, "e": {"$anchor": "e", "enum": [1]}}},
     ['{"x": null, "y": 1}'], ['{"x": 1}', '{"y": 2}']),
    # rewritten
    ({**ABC, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}"]),
    ({"$defs": KINDS, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}, ['{"kind": "dog"}'], ['{"kind": "cow"}', "1"]),
    ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}, {"enum": [1.5, True]}]}, ["1", "null", "true"], ["2.5", "false"]),
    ({"oneOf": [{**CLOSED, "required": ["a"]}, {"type": "object", "required": ["x"]}]}, ['{"a": 1}', '{"x": 2}'], ['{"a":1,"x":1}']),
    ({"not": {"type": "string"}}, ["1", "[]"], ['"a"']),
    ({"not": {"enum": ["foo", "fob", ""]}, "type": "string"}, ['"fox"', '"fo"', '"foob"'], ['"foo"', '"fob"', '""', "1"]),
    ({"not": {"required": ["a", "b"]}, **ABC}, ['{"a":1}', '{"b":1}', "{}"], ['{"a":1,"b":1}']),
    ({"not": {"not": {"minimum": 3}}, "type": "integer"}, ["3"], ["2"]),
    ({"if": {"properties": {"b": {"const": "x"}}, "required": ["b"]}, "then": {"required": ["cc"]}, **ABC},
     ['{"b":"y"}', '{"b":"x","cc":1}', "{}"], ['{"b":"x"}']),
    ({**ABC, "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":1}', '{"b":1}', '{"x":1}'], ['{"a":1}']),
    ({**ABC, "dependencies": {"a": {"required": ["b"]}}}, ['{"a":1,"b":1}', "{}"], ['{"a":1}']),
    ({**ABC, "propertyNames": {"pattern": "^.$"}}, ['{"a":1,"q":1}'], ['{"cc":1}', '{"qq":1}', '{"a":"x"}']),
    ({**ABC, "propertyNames": {"minLength": 2}}, ['{"cc":1}'], ['{"a":1}']),
    ({**ABC, "propertyNames": {"enum": ["a", "q"]}}, ['{"a":1,"q":1}'], ['{"b":1}', '{"a":"x"}']),
    ({**ABC, "unevaluatedProperties": False}, ['{"a":1}'], ['{"x":1}']),
    ({"type": "array", "prefixItems": [{"enum": [1]}], "unevaluatedItems": False}, ["[1]", "[]"], ["[1,1]"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_holds_what_it_says(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(json=schema), text), text
    for text in bad:
        assert not accepts(matcher(json=schema), text), text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, "#/properties/a: not: "),
        ({"items": {"uniqueItems": True}}, "#/items: uniqueItems: "),
        ({"type": "object", "minProperties": 2}, "#: minProperties: "),
        ({"minProperties": 1, "properties": {str(n): {} for n in range(17)}}, "#: minProperties: it is held beside at"),
        ({"anyOf": [{"type": "null"}, {"contains": {}}]}, "#/anyOf/1: contains: "),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#: oneOf: "),
        ({"$ref": "#"}, "#: $ref: it leads to nothing but itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#: $ref: it leads"),
        (
            {"$ref": "http://json-schema.org/draft-07/schema#"},
            "#: $ref: 'http://json-schema.org/draft-07/schema#' is not",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "(?=x)"}}}, "#/$defs/a: pattern: (?=x (a look-around"),
        ({"items": {"type": "dict"}}, "#/items: type: 'dict' is no type"),
        ({"items": 3}, "#/items: int given"),
        ({"const": "\0"}, "#: const: there is no value that could be written"),
        (
            {"properties": {"a": {"unevaluatedProperties": False, "anyOf": []}}},
            "#/properties/a: unevaluatedProperties: ",
        ),
    ],
)
def test_what_no_grammar_holds_is_refused_with_its_keyword_and_place_or_left_out(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_source(StructuredOutputs(json=schema), field="some.field")
    assert str(caught.value).startswith(f"some.field: {place}")
    assert prepared(schema, "", lenient=True) is not None


def test_a_one_of_that_is_not_held_exactly_is_taken_for_any_of_where_the_user_says_so() -> None:
    number = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    with pytest.raises(InvalidRequest, match=r"structured_outputs.json: #: oneOf: .* structured_outputs.coerce_one_of"):
        matcher(json=number)
    tag = {"structures": [{"begin": "<", "schema": number, "end": ">"}], "triggers": ["<"]}
    for found, before, after in (
        (matcher(json=number, coerce_one_of=True), "", ""),
        (matcher(structural_tag=tag, coerce_one_of=True), "so <", ">"),
    ):
        assert accepts(found, f"{before}1.5{after}")
    assert not accepts(matcher(json=number, coerce_one_of=True), '"a"')
    exact = {**ABC, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert not accepts(matcher(json=exact, coerce_one_of=True), '{"a":1,"b":1}')
    with pytest.raises(InvalidRequest, match="structured_outputs.coerce_one_of: regex holds no oneOf"):
        matcher(regex="a", coerce_one_of=True)


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
PAIR = {"l": {**ENDLESS, "properties": {"a": {"$ref": "#/$defs/m"}}}, "m": {"minItems": 1, "items": {"$ref": "#/$defs/l"}, "type": "array"}}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        ENDLESS,
        {"type": "array", "minItems": 2, "prefixItems": [True], "items": {"$ref": "#"}},
        {"$defs": PAIR, "anyOf": [{"$ref": "#/$defs/l"}, {"$ref": "#/$defs/m"}]},
        {**ENDLESS, "properties": {}, "additionalProperties": {"$ref": "#"}},
    ],
)
def test_a_schema_that_requires_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="json: #: it requires itself, so that no answer could ever end"):
        matcher(json=schema)
    lenient = lark_json(schema, "", lenient=True)
    with pytest.raises((GrammarRefused, InvalidRequest)):
        matcher(grammar=f"start: {lenient}")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"anyOf": [ENDLESS, {"type": "null"}]}, ['{"a": {"a": null}}'], ["1"]),
        ({**ENDLESS, "type": ["object", "null"]}, ['{"a": {"a": null}}'], ['{"a": 1}']),
        ({"type": "object", "$defs": PAIR, "properties": {"x": {"$ref": "#/$defs/l"}}}, ["{}"], ['{"x"', '{"x": 1}']),
        ({"type": ["object", "null"], "required": ["a"], "properties": {"a": {"$ref": "#", "type": "object"}}},
         ["null"], ["{", '{"a": null}']),
        ({"type": "array", "$defs": PAIR, "items": {"$ref": "#/$defs/m"}}, ["[]"], ["[["]),
    ],
)  # fmt: skip
def test_what_requires_itself_within_a_schema_is_what_nothing_keeps_to(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(matcher(json=schema), text), text
    for text in bad:
        assert not all(map(matcher(json=schema).advance, ([byte] for byte in text.encode()))), text


def test_a_lenient_reading_takes_one_of_for_any_of() -> None:
    assert "anyOf" in json.dumps(prepared({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "", lenient=True))


@pytest.mark.parametrize(
    "schema",
    [{"enum": []}, {"enum": [1], "type": "string"}, {"required": ["a"], "properties": {"a": False}, "type": "object"}],
)
def test_a_schema_that_nothing_keeps_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises((GrammarRefused, InvalidRequest)):
        matcher(json=schema)


@pytest.mark.parametrize(
    "pattern", [r"\b", r"(a)\1", "a(?!b)", "a(?<=b)", "[b-a]", "[a", "a\\", r"\A", r"\k<a>", r"\ud800"]
)
def test_a_pattern_that_cannot_be_followed_is_said_to_be_one(pattern: str) -> None:
    with pytest.raises(ValueError, match=".+"):
        translated(pattern)


def test_a_keyword_of_any_shape_is_taken_or_refused_but_breaks_nothing() -> None:
    keywords = [*_OF_ALL, *["type", "const", "format", "$ref", "$id", "$anchor"]]
    values: list[Any] = [
        None,
        True,
        1.5,
        -1,
        "a[",
        "http://[",
        [],
        [3, None],
        [{"a": []}],
        {},
        {"a": 3},
        {"type": [[]]},
        [["a"]],
    ]
    rng = random.Random(5)
    for _ in range(20_000):
        inner = {rng.choice(keywords): rng.choice(values) for _ in range(3)}
        schema = {**inner, rng.choice(keywords): rng.choice([inner, [inner, inner], {"a": inner}])}
        for lenient in (False, True):
            try:
                prepared(schema, "field", lenient)
            except InvalidRequest:
                assert not lenient, schema


def test_the_examples_are_right_by_an_independent_validator() -> None:
    checker = jsonschema.FormatChecker(["date"])
    for schema, good, bad in HELD:
        if "attern" in json.dumps(schema):  # it knows Python's only
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for text in good:
            assert validator.is_valid(json.loads(text)), (schema, text)
        bad = [text for text in bad if text == json.dumps(json.loads(text))] if not schema.get("format") else []
        assert not any(map(validator.is_valid, map(json.loads, bad))), schema
