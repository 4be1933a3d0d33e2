"""Builds grammar rules for the arguments of a tool call, with one class per spelling (engine/text/tools/formats.py).

    JSON            {"city": "Ulm"}                                     llguidance compiles the schema
    tagged text     <parameter=city>\nUlm\n</parameter>                 strings are verbatim, other values are JSON
    Python          city="Ulm", far=True                                values are JSON, except True, False and None
    quoted text     city:<|"|>Ulm<|"|>,far:true                         strings are enclosed in the model's own quotes

Properties are written in the schema's order. If the schema names properties, no others are allowed. A keyword that the
grammar cannot enforce in a spelling is refused for a strict function and ignored for any other function. The `format`
of a string that is not written as JSON is an annotation.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engine.grammar.json_schema import lark_json, prepared
from penstock.engine.grammar.rules import ANY, BLANK, Rules, escaped
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.tools.arguments import Parameters, kinds, target, typed
from penstock.engine.text.tools.call_kinds import ToolFormat, ToolSpec
from penstock.engine.text.tools.scan import MAX_DEPTH

# One space after comma and colon, as chat templates print JSON. With whitespace fixed, the model has no meaningless
# choice, and the grammar can force these tokens instead of sampling them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_LENGTH = 2000  # largest minLength or maxLength: each character is a state of the lexer, which has 50,000
_COMBINING = frozenset(("$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const"))
# Keywords that are not enforced on a value of these types unless it is written as JSON.
_UNHELD = {
    "string": _COMBINING | {"pattern"},
    "array": _COMBINING | {"prefixItems", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"},
    "object": _COMBINING
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
    | {"dependencies", "dependentRequired", "dependentSchemas"},
}
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# First characters of values that the parser of the answer would not read as a string.
_BEGINNINGS = {"array": r"\[", "object": r"\{", "integer": "-0-9", "number": "-0-9"}
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # property names if the schema names none
_ROOT = "arguments"  # the key in `$defs` under which a part of the schema refers to the whole schema


def argument_rules(rules: Rules, form: ToolFormat, function: ToolSpec, index: int) -> str:
    """Add the rule for the arguments of a function, without the text that encloses them, and return its name. `index`
    is the function's position among the request's functions."""
    if form.parameters is None:
        schema = {**function.parameters}
        if not function.is_strict or "type" not in schema:
            schema["type"] = "object"
        return rules.shared(lark_json(prepared(schema, "tools", function.name), **_options(function)))
    kind = {"": _Tagged, '"': _Python}.get(form.parameters.quote, _Quoted)
    return rules.shared(kind(rules, form, function, f"value_{index}").all())


def _options(function: ToolSpec) -> dict[str, Any]:
    is_lenient = not function.is_strict
    return {"lenient": is_lenient, "coerce_one_of": is_lenient or function.coerce_one_of, **_SPACING}


class _Arguments(ABC):
    """Builds the rules for arguments that are written one by one, not as one JSON object."""

    key: str  # regular expression of the property names that can be written

    def __init__(self, rules: Rules, form: ToolFormat, function: ToolSpec, prefix: str) -> None:
        assert form.parameters is not None
        self._rules, self._form, self._function, self._prefix = rules, form, function, prefix
        self._parameters: Parameters = form.parameters
        self._root = prepared({"type": "object", **function.parameters}, "tools", function.name)

    def all(self) -> str:
        """Return the Lark expression for all arguments."""
        schema = self._root
        for _ in range(MAX_DEPTH):  # bounded, because a chain of references may be circular
            schema = self._target(schema["$ref"]) if "$ref" in schema else schema
        parameters = self._parameters
        return self._object(schema, parameters.before_key, parameters.before_value, parameters.join)

    def _object(self, schema: Mapping[str, Any], before_key: str, colon: str, join: str) -> str:
        self._check(schema, "object")
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

    def _branches(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema. A reference is followed only once, because references may be circular."""
        if not isinstance(schema, dict):
            if schema is False:
                self._refuse("false")
            schema = {}
        union = next((name for name in ("anyOf", "oneOf", "allOf") if name in schema), "")
        if "$ref" in schema:
            if schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                yield from self._branches(self._target(schema["$ref"]), seen)
        elif union:
            is_exact = union == "anyOf" or len(schema[union]) == 1 or self._function.coerce_one_of
            if not is_exact or schema.keys() - {union, "discriminator", "type"}:
                self._refuse(f"{union}: beside other keywords, or not exactly")
            for member in schema[union]:
                yield from self._branches(member, seen)
        else:
            yield schema

    def _target(self, reference: str) -> Any:
        found = target(reference, self._root)
        if not isinstance(found, dict) or not reference.startswith("#"):
            self._refuse(f"$ref: {reference[:100]!r} is not a place in this schema")
            return {}
        return found

    def _check(self, schema: Mapping[str, Any], kind: str) -> None:
        if unheld := schema.keys() & _UNHELD[kind]:
            self._refuse(min(unheld))

    def _refuse(self, what: str) -> None:
        if self._function.is_strict:
            raise InvalidRequest(
                "tools", f"{self._function.name}: {what}: calls of {self._form.name} are not held to that"
            )

    def _types(self, branch: Mapping[str, Any]) -> list[str]:
        found = kinds(branch, self._root)
        return sorted(found - {"integer"} if "number" in found else found)

    def _json(self, branch: Mapping[str, Any], kind: str) -> str:
        """Return the name of a rule for a value of this type, written as JSON."""
        branch = {**branch, "type": kind}
        schema = _moved(branch)
        if schema != branch:  # the branch has references, which are relative to the whole schema
            root = {name: inner for name, inner in self._root.items() if name not in ("$id", "id")}
            schema["$defs"] = {_ROOT: _moved(root)}
        return self._rules.shared(lark_json(schema, **_options(self._function)))

    def _until(self, pattern: str, mark: str) -> str:
        """Return the name of a rule for text of this pattern, up to and including a mark."""
        behind = self._rules.text(mark)
        terminal = self._rules.shared(f"{pattern} & ~/{ANY}{escaped(mark)}{ANY}/", is_terminal=True)
        return self._rules.shared(f"{terminal} {behind}", is_lazy=behind.startswith('"'))

    def _text(self, branch: Mapping[str, Any]) -> str:
        """Return the regular expression of a string that is not written as JSON."""
        self._check(branch, "string")
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
        for branch in self._branches(schema, set()):
            if (values := _values(branch)) is not None:
                texts = {value if isinstance(value, str) else json.dumps(value): value for value in values}
                texts = {text: value for text, value in texts.items() if json.loads(typed(text, wanted)) == value}
                words = [escaped(text) for text, value in texts.items() if isinstance(value, str) and mark not in text]
                patterns += [f"({'|'.join(words)})"] if words else []
                ways += [f"{json.dumps(text)} {behind}" for text in texts if not isinstance(texts[text], str)]
                continue
            for kind in self._types(branch):
                if kind == "string":
                    patterns.append(self._text(branch))
                    continue
                if branch.keys() & _OF_NUMBERS:
                    excluded.add(kind)
                ways.append(f"{self._json(branch, kind)} {behind}")
        beginnings = "".join(_BEGINNINGS.get(kind, "") for kind in sorted(excluded))
        without = rf" & ~/{BLANK}[{beginnings}]{ANY}/" if beginnings else ""
        line = "\\n" if self._parameters.trims else ""
        for pattern in dict.fromkeys(patterns):
            text = self._until(f"/{pattern}{line}/{without}", mark)
            ways.append(f"{text} {self._rules.text(closer[len(closer.rstrip()) :])}")
        if not ways:
            self._refuse("enum: none of the values can be written")
            return self._value({})
        return f"({' | '.join(dict.fromkeys(ways))})"


class _Python(_Arguments):
    """Builds rules for Python literals: JSON, except for True, False and None."""

    key = r"[A-Za-z_][A-Za-z0-9_]*"

    def _value(self, schema: Any) -> str:
        ways: list[str] = []
        for branch in self._branches(schema, set()):
            if (values := _values(branch)) is not None:
                texts = (str(value) if value in (True, False, None) else json.dumps(value) for value in values)
                ways += map(json.dumps, texts)
                continue
            for kind in self._types(branch):
                words = {"boolean": '"True" | "False"', "null": '"None"'}.get(kind)
                ways.append(words or self._json(branch, kind))
        return f"({' | '.join(dict.fromkeys(ways))})"


class _Quoted(_Arguments):
    """Builds rules for JSON with unquoted names and with verbatim strings between the model's own quotes."""

    key = r"[^\s,:=(){}\[\]<>'\"\\]+"

    def __init__(self, rules: Rules, form: ToolFormat, function: ToolSpec, prefix: str) -> None:
        super().__init__(rules, form, function, prefix)
        self._known: dict[str, str] = {}  # schema as JSON → name of its rule

    def _value(self, schema: Any) -> str:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:  # registered before the body is built, which may refer to the same rule
            name = self._known[key] = f"{self._prefix}_{len(self._known)}"
            ways = dict.fromkeys(way for branch in self._branches(schema, set()) for way in self._ways(branch))
            self._rules.lines.append(f"{name}: {' | '.join(ways)}")
        return self._known[key]

    def _ways(self, branch: Mapping[str, Any]) -> Iterator[str]:
        quote = self._parameters.quote
        if (values := _values(branch)) is not None:
            yield from (self._rules.text(self._written(value)) for value in values if quote not in str(value))
            return
        for kind in self._types(branch):
            if kind == "string":
                yield f"{self._rules.text(quote)} {self._until(f'/{self._text(branch)}/', quote)}"
            elif kind == "array":
                self._check(branch, "array")
                item, low, high = (
                    self._value(branch.get("items", True)),
                    branch.get("minItems", 0),
                    branch.get("maxItems"),
                )
                more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
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


def _moved(schema: Any) -> Any:
    """Return a copy with the references rewritten for a schema that is stored under `$defs`."""
    if isinstance(schema, list):
        return [_moved(member) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for name, inner in schema.items():
        if name == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            found[name] = f"#/$defs/{_ROOT}{inner[1:]}"
        else:
            is_data = name == "enum" and isinstance(inner, list)
            found[name] = inner if is_data else _moved(inner)
    return found


def _values(branch: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] | None = branch.get("enum", [branch["const"]] if "const" in branch else None)
    return found
