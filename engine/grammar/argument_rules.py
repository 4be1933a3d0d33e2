"""Builds grammar rules for the arguments of a tool call, with one class per spelling (engine/text/tools/formats.py).

    JSON            {"city": "Ulm"}                                     llguidance compiles the schema
    tagged text     <parameter=city>\nUlm\n</parameter>                 strings are verbatim, other values are JSON
    Python          city="Ulm", far=True                                values are JSON, except True, False and None
    quoted text     city:<|"|>Ulm<|"|>,far:true                         strings are enclosed in the model's own quotes

Properties are written in the schema's order. If the schema names properties, no others are allowed. A keyword that the
grammar cannot enforce in a spelling is refused for a strict function and ignored for any other function. The `format`
of a string that is not written as JSON is an annotation. A schema that is invalid or too large is always refused.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NoReturn, TypedDict

import msgspec

from penstock.engine.grammar.json_schema import lark_json, prepared
from penstock.engine.grammar.rules import ANY, BLANK, Rules, escaped
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS
from penstock.engine.text.tools.arguments import ALL, Parameters, followed, kinds, target, typed
from penstock.engine.text.tools.call_kinds import ToolFormat, ToolSpec

# One space after comma and colon, as chat templates print JSON. With whitespace fixed, the model has no meaningless
# choice, and the grammar can force these tokens instead of sampling them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_LENGTH = 2000  # largest minLength or maxLength: each character is a state of the lexer, which has 50,000
_COMBINING = frozenset(("$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const"))
# Keywords that are not enforced on a value of these types unless it is written as JSON.
_NOT_ENFORCED = {
    "string": _COMBINING | {"pattern"},
    "array": _COMBINING | {"prefixItems", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"},
    "object": _COMBINING
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
    | {"dependencies", "dependentRequired", "dependentSchemas"},
}
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# The keywords that rules are built from, with the type of their values. llguidance checks values written as JSON.
_USED: dict[str, Any] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Annotated[int, msgspec.Meta(ge=0)]),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum"), Annotated[list[Any], msgspec.Meta(min_length=1)]),
    "type": str | Annotated[list[str], msgspec.Meta(min_length=1)],
    "properties": dict[str, Any],
    "required": list[str],
    "$ref": str,
}
_Keywords: Any = TypedDict("_Keywords", _USED, total=False)  # type: ignore[misc]
_RESTRICTING = _OF_NUMBERS.union(_USED, *_NOT_ENFORCED.values(), ("items", "additionalProperties")) - {"type"}
_SHARED = 8  # only a part of a rule's length is counted, because many values have equal rules, which are shared
# First characters of values that the parser of the answer would not read as a string.
_BEGINNINGS = {"array": r"\[", "object": r"\{", "integer": r"\-0-9", "number": r"\-0-9"}
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # property names if the schema names none


def argument_rules(rules: Rules, form: ToolFormat, function: ToolSpec) -> str:
    """Add the rule for the arguments of a function, without the text that encloses them, and return its name."""
    if form.parameters is None:
        schema = prepared({**function.parameters, "type": "object"}, "tools", function.name)
        return rules.shared(lark_json(schema, **_options(function)))
    kind = {"": _Tagged, '"': _Python}.get(form.parameters.quote, _Quoted)
    return rules.shared(kind(rules, form, function).all())


def _options(function: ToolSpec) -> dict[str, Any]:
    is_lenient = not function.is_strict
    return {"lenient": is_lenient, "coerce_one_of": is_lenient or function.coerce_one_of, **_SPACING}


class _Arguments(ABC):
    """Builds the rules for arguments that are written one by one, not as one JSON object."""

    key: str  # regular expression of the property names that can be written

    def __init__(self, rules: Rules, form: ToolFormat, function: ToolSpec) -> None:
        assert form.parameters is not None
        self._rules, self._form, self._function = rules, form, function
        self._parameters: Parameters = form.parameters
        root = prepared({**function.parameters, "type": "object"}, "tools", function.name)
        self._root = {name: inner for name, inner in root.items() if name not in ("$id", "id")}
        self._num_chars = 0

    def all(self) -> str:
        """Return the Lark expression for all arguments."""
        *references, schema = map(self._checked, followed(self._root))
        for reference in references:
            self._check(reference, _RESTRICTING - {"$ref"}, "$ref: beside ")
        parameters = self._parameters
        return self._object(schema, parameters.before_key, parameters.before_value, parameters.join)

    def _object(self, schema: Mapping[str, Any], before_key: str, colon: str, join: str) -> str:
        self._check(schema, _NOT_ENFORCED["object"])
        text, pairs = self._rules.text, []
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = schema.get("additionalProperties", True)
        for name, inner in {**properties, **{name: others for name in required if name not in properties}}.items():
            if re.fullmatch(self.key, name) and inner is not False:
                pairs.append((f"{text(before_key + name + colon)} {self._value(inner)}", name in required))
            elif name in required:
                self._refuse(f"required: {name!r} cannot be written as a name")
        if pairs or others is False:
            return self._members(pairs, join)
        pair = self._rules.shared(f"{text(before_key)} {_ANY_KEY} {text(colon)} {self._value(others)}")
        return f"({pair} ({text(join)} {pair})*)?"

    def _members(self, pairs: list[tuple[str, bool]], join: str) -> str:
        """Return the Lark expression for the pairs in order; each pair that is not required is optional."""
        if not join:
            return " ".join(f"({pair}){'' if is_needed else '?'}" for pair, is_needed in pairs)
        rest, num_needed = "", 0
        ways: list[str] = []
        for pair, is_needed in reversed(pairs):
            num_needed += is_needed
            ways = [f"{pair} {rest}", *([] if is_needed else ways)]
            rest = self._rules.shared(f"({self._rules.text(join)} {pair}){'' if is_needed else '?'} {rest}")
        return f"({' | '.join(ways)}){'' if num_needed else '?'}" if ways else ""

    @abstractmethod
    def _value(self, schema: Any) -> str:
        """Return the Lark expression for one value and the text that closes it."""

    def _branches(self, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the alternatives of a schema: "enum" and the schema with its values, or a type and the schema of its values.
        A reference is followed only once, because references may be circular."""
        pending, seen = [(schema, ALL)], set[tuple[str, frozenset[str]]]()
        while pending:
            schema, types = pending.pop()
            schema = self._checked(schema)
            types = types & kinds(schema, None) if "type" in schema else types
            head = next((name for name in ("enum", "const", "anyOf", "oneOf", "allOf", "$ref") if name in schema), "")
            if head:
                self._check(schema, _RESTRICTING - {head, "const"}, f"{head}: beside ")
            if head == "$ref":
                following = [] if (schema[head], types) in seen else [self._target(schema[head])]
                seen.add((schema[head], types))
            elif head in ("anyOf", "oneOf", "allOf"):
                following = schema[head]
                if head != "anyOf" and len(following) > 1 and not (head == "oneOf" and self._function.coerce_one_of):
                    self._refuse(f"{head}: not exactly")
            else:
                following = []
                if head:
                    only = [schema["const"]] if "const" in schema else None
                    values = [value for value in schema.get("enum", only) if only is None or value in only]
                    yield "enum", {"enum": [value for value in values if kinds({"const": value}, None) <= types]}
                else:
                    names = types - {"integer"} if "number" in types else types
                    yield from ((kind, schema) for kind in sorted(names))
            pending += [(each, types) for each in reversed(following)]

    def _checked(self, schema: Any) -> dict[str, Any]:
        """Return the schema; raise InvalidRequest if a keyword from which a rule is built has a value of a wrong type."""
        if schema is False:
            self._refuse("false")
        checked: dict[str, Any] = {} if isinstance(schema, bool) else schema
        try:
            found: dict[str, Any] = msgspec.convert(checked, _Keywords)
        except msgspec.ValidationError as error:
            self._raise(str(error))
        self._count(16 + sum(16 * len(value) for value in found.values() if isinstance(value, (dict, list))))
        names = found.get("type", [])
        if unknown := set([names] if isinstance(names, str) else names) - ALL:
            self._refuse(f"type: {min(unknown)[:100]!r}")
        return checked

    def _count(self, num_chars: int) -> None:
        """Count what a rule is built from. References can make a small schema a large grammar, or a long computation."""
        self._num_chars += num_chars
        if self._num_chars > MAX_GRAMMAR_CHARS:
            self._raise(f"its grammar would have more than {MAX_GRAMMAR_CHARS} characters")

    def _raise(self, reason: str) -> NoReturn:
        raise InvalidRequest("tools", f"{self._function.name}: {reason}")

    def _target(self, reference: str) -> Any:
        if (found := target(reference, self._root)) is None:
            self._refuse(f"$ref: {reference[:100]!r} is not a place in this schema")
        return {} if found is None else found

    def _check(self, schema: Mapping[str, Any], not_enforced: frozenset[str], where: str = "") -> None:
        if found := schema.keys() & not_enforced:
            self._refuse(where + min(found))

    def _refuse(self, feature: str) -> None:
        if self._function.is_strict:
            self._raise(f"{feature}: calls of {self._form.name} are not held to that")

    def _json(self, branch: Mapping[str, Any], kind: str) -> str:
        """Return the name of a rule for a value of this type, written as JSON."""
        places: dict[str, str] = {}  # reference, relative to the whole schema → reference to the definition here
        schema, definitions = _moved({**branch, "type": kind}, places), dict[str, Any]()
        while len(definitions) < len(places):  # definitions may have references as well
            for reference in [*places][len(definitions) :]:
                definitions[str(len(definitions))] = _moved(self._target(reference), places)
        if definitions:
            schema["$defs"] = definitions
        text = lark_json(schema, **_options(self._function))
        self._count(len(text) // _SHARED)
        return self._rules.shared(text)

    def _one_of(self, ways: Iterable[str]) -> str:
        """Return the Lark expression for the ways to write a value; for any value if there are none."""
        found = " | ".join(dict.fromkeys(ways))
        if not found:
            self._refuse("none of the values can be written")
            return self._value({})
        self._count(len(found))
        return f"({found})"

    def _until(self, pattern: str, mark: str) -> str:
        """Return the name of a rule for text of this pattern, up to and including a mark."""
        behind = self._rules.text(mark)
        self._count(len(pattern) // _SHARED)
        terminal = self._rules.shared(f"{pattern} & ~/{ANY}{escaped(mark)}{ANY}/", is_terminal=True)
        return self._rules.shared(f"{terminal} {behind}", is_lazy=behind.startswith('"'))

    def _text(self, branch: Mapping[str, Any]) -> str:
        """Return the regular expression of a string that is not written as JSON."""
        self._check(branch, _NOT_ENFORCED["string"])
        low, high = branch.get("minLength", 0), branch.get("maxLength", "")
        if max(low, high or 0) > _MAX_LENGTH:
            self._refuse(f"a length above {_MAX_LENGTH}")
            return ANY
        return f"(.|\\n){{{low},{high}}}" if low or high != "" else ANY


class _Tagged(_Arguments):
    """Builds rules for values written as text up to a mark. If the schema allows strings and another type, a value that
    begins like the other type is parsed as that type."""

    key = r'[^<>"\n]{1,255}'

    def _value(self, schema: Any) -> str:
        closer, wanted = self._parameters.after_value, kinds(schema, self._root)
        mark, behind = closer.strip(), self._rules.text(closer)
        ways: list[str] = []
        patterns: list[str] = []
        excluded = set(wanted & {"array", "object"})
        for kind, branch in self._branches(schema):
            if kind == "enum":
                texts = {value if isinstance(value, str) else json.dumps(value): value for value in branch["enum"]}
                texts = {text: value for text, value in texts.items() if json.loads(typed(text, wanted)) == value}
                words = [escaped(text) for text, value in texts.items() if isinstance(value, str) and mark not in text]
                patterns += [f"({'|'.join(words)})"] if words else []
                ways += [f"{json.dumps(text)} {behind}" for text in texts if not isinstance(texts[text], str)]
            elif kind == "string":
                patterns.append(self._text(branch))
            else:
                excluded |= {kind} if branch.keys() & _OF_NUMBERS else set()
                ways.append(f"{self._json(branch, kind)} {behind}")
        beginnings = "".join(_BEGINNINGS.get(kind, "") for kind in sorted(excluded))
        without = rf" & ~/{BLANK}[{beginnings}]{ANY}/" if beginnings else ""
        line = "\\n" if self._parameters.trims else ""
        for pattern in dict.fromkeys(patterns):
            text = self._until(f"/{pattern}{line}/{without}", mark)
            ways.append(f"{text} {self._rules.text(closer[len(closer.rstrip()) :])}")
        return self._one_of(ways)


class _Python(_Arguments):
    """Builds rules for Python literals: JSON, except for True, False and None."""

    key = r"[A-Za-z_][A-Za-z0-9_]*"

    def _value(self, schema: Any) -> str:
        ways: list[str] = []
        for kind, branch in self._branches(schema):
            if kind == "enum":
                for value in branch["enum"]:
                    ways.append(json.dumps(str(value) if value in (True, False, None) else json.dumps(value)))
            else:
                words = {"boolean": '"True" | "False"', "null": '"None"'}.get(kind)
                ways.append(words or self._json(branch, kind))
        return self._one_of(ways)


class _Quoted(_Arguments):
    """Builds rules for JSON with unquoted names and with verbatim strings between the model's own quotes."""

    key = r"[^\s,:=(){}\[\]<>'\"\\]+"

    def all(self) -> str:
        self._rule_names: dict[str, str] = {}  # schema as JSON → name of its rule
        self._prefix = f"value_{len(self._rules.lines)}"  # no other function's, because each adds lines
        self._pending: list[tuple[str, Any]] = []  # rules to build, with their schemas; each may add others
        arguments = super().all()
        for name, schema in self._pending:
            ways = (way for kind, branch in self._branches(schema) for way in self._ways(kind, branch))
            self._rules.lines.append(f"{name}: {self._one_of(ways)}")
        return arguments

    def _value(self, schema: Any) -> str:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._rule_names:
            self._rule_names[key] = f"{self._prefix}_{len(self._rule_names)}"
            self._pending.append((self._rule_names[key], schema))
        return self._rule_names[key]

    def _ways(self, kind: str, branch: Mapping[str, Any]) -> Iterator[str]:
        quote = self._parameters.quote
        if kind == "enum":
            yield from (self._rules.text(self._written(value)) for value in branch["enum"] if quote not in str(value))
        elif kind == "string":
            yield f"{self._rules.text(quote)} {self._until(f'/{self._text(branch)}/', quote)}"
        elif kind == "array":
            self._check(branch, _NOT_ENFORCED["array"])
            items, low, high = branch.get("items", True), branch.get("minItems", 0), branch.get("maxItems")
            if isinstance(items, list):  # what older drafts have for prefixItems
                self._refuse("items: a list")
            item = self._value(True if isinstance(items, list) else items)
            more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
            more = "" if low <= 1 == high else more  # llguidance refuses to repeat nothing
            yield '"[" "]"' if high == 0 else f'"[" ({item} {more}){"" if low else "?"} "]"'
        elif kind == "object":
            yield f'"{{" {self._object(branch, "", ":", ",")} "}}"'
        else:
            yield self._json(branch, kind)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._parameters.quote}{value}{self._parameters.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{name}:{self._written(inner)}' for name, inner in value.items())}}}"
        return json.dumps(value)


def _moved(schema: Any, places: dict[str, str]) -> Any:
    """Return a copy with the references rewritten, each to its own place under `$defs`; new ones are added."""
    if isinstance(schema, list):
        return [_moved(member, places) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for name, inner in schema.items():
        if name == "$ref" and isinstance(inner, str):
            found[name] = places.setdefault(inner, f"#/$defs/{len(places)}")
        else:
            is_data = name == "enum" and isinstance(inner, list)
            found[name] = inner if is_data else _moved(inner, places)
    return found
