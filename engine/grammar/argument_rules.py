"""Builds grammar rules for the arguments of a tool call, with one class per spelling (engine/text/tools/formats.py).

    JSON            {"city": "Ulm"}                                     llguidance compiles the schema
    tagged text     <parameter=city>\nUlm\n</parameter>                 strings are verbatim, other values are JSON
    Python          city="Ulm", far=True                                values are JSON, except True, False and None
    quoted text     city:<|"|>Ulm<|"|>,far:true                         strings are enclosed in the model's own quotes

Properties are written in the schema's order. If the schema names properties, no others are allowed. A keyword that the
grammar cannot enforce in a spelling is refused for a strict function and ignored for any other function.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engine.grammar.json_schema import lark_json, lark_prepared, prepared
from penstock.engine.grammar.rules import ANY, BLANK, Rules, escaped, slashed
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.tools.arguments import Parameters, kinds, target, typed
from penstock.engine.text.tools.call_kinds import ToolFormat
from penstock.engine.text.tools.formats import ToolSpec
from penstock.engine.text.tools.scan import MAX_DEPTH

# One space after comma and colon, as chat templates print JSON. With whitespace fixed, the model has no meaningless
# choice, and the grammar can force these tokens instead of sampling them.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_LENGTH = 2000  # largest minLength or maxLength: each character is a state of the lexer, which has 50,000
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
_OF_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties"))
_OF_OTHERS = frozenset((
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
))  # fmt: skip
# The keywords that llguidance enforces, and those that it does not; all others are annotations.
_HELD = _OF_STRINGS | _OF_OTHERS | {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
_UNHELD = frozenset((
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
))  # fmt: skip
# First characters of values that the parser of the answer would not read as a string.
_BEGINNINGS = {"array": r"\[", "object": r"\{", "integer": "-0-9", "number": "-0-9"}
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # property names if the schema names none
_ROOT = "arguments"  # the key in `$defs` under which a part of the schema refers to the whole schema
# These match a subset of each format. The only invalid match is 29 February in a common year, as in llguidance.
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+",
    "uri": r"[a-z][a-z0-9+.\-]*:\/\/[A-Za-z0-9._~:\/?@!$&'()*+,;=\-]+",
    "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+H)?|T[0-9]+(H([0-9]+M)?|M([0-9]+S)?|S))",
}


def argument_rules(rules: Rules, form: ToolFormat, function: ToolSpec, index: int) -> str:
    """Add the rule for the arguments of a function, without the text that encloses them, and return its name. `index`
    is the function's position among the request's functions."""
    if form.parameters is None:
        schema = {**function.parameters}
        if not function.is_strict or "type" not in schema:
            schema["type"] = "object"
        coerces = function.coerce_one_of
        return rules.shared(lark_json(schema, "tools", not function.is_strict, function.name, coerces, **_SPACING))
    kind = {"": _Tagged, '"': _Python}.get(form.parameters.quote, _Quoted)
    return rules.shared(kind(rules, form, function, f"value_{index}").all())


class _Arguments(ABC):
    """Builds the rules for arguments that are written one by one, not as one JSON object."""

    key: str  # regular expression of the property names that can be written

    def __init__(self, rules: Rules, form: ToolFormat, function: ToolSpec, prefix: str) -> None:
        assert form.parameters is not None
        self._rules, self._form, self._function, self._prefix = rules, form, function, prefix
        self._parameters: Parameters = form.parameters
        schema = {"type": "object", **function.parameters}
        self._root = prepared(schema, "tools", not function.is_strict, function.name)

    def all(self) -> str:
        """Return the Lark expression for all arguments."""
        schema = self._held(self._root)
        for _ in range(MAX_DEPTH):  # bounded, because a chain of references may be circular
            schema = self._held(self._target(schema["$ref"])) if "$ref" in schema else schema
        parameters = self._parameters
        return self._object(schema, parameters.before_key, parameters.before_value, parameters.join)

    def _object(self, schema: Mapping[str, Any], before_key: str, colon: str, join: str) -> str:
        self._check(schema, _OF_ARGUMENTS)
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

    # -- schemas ---------------------------------------------------------------------------------------------

    def _branches(self, schema: Any, seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema. Each is an enumeration, has one type, or has no constraint. A reference
        is followed only once, because references may be circular."""
        seen, found = set() if seen is None else seen, self._held(schema)
        several = next((name for name in ("anyOf", "oneOf") if name in found), "")
        if not several and len(found.get("allOf", ())) == 1:
            several = "allOf"
        if several == "oneOf" and not self._function.coerce_one_of and not self._are_of_different_types(found["oneOf"]):
            self._refuse("oneOf: two of its schemas can hold for the same value")
        if "$ref" in found:
            self._check(found, frozenset(("$ref",)))
            if found["$ref"] not in seen:
                seen.add(found["$ref"])
                yield from self._branches(self._target(found["$ref"]), seen)
        elif several:
            rest = {name: inner for name, inner in found.items() if name != several}
            for member in map(self._held, found[several]):
                if any(rest[name] != member[name] for name in rest.keys() & member.keys()):
                    self._refuse(f"{several}: beside a keyword that its schemas have as well")
                yield from self._branches({**rest, **member}, seen)
        elif isinstance(types := found.get("type"), list) and not found.keys() & {"enum", "const"}:
            yield from ({**found, "type": kind} for kind in types)
        else:
            if found and not found.keys() & {"type", "enum", "const"}:
                self._refuse(f"{min(found)}: without a type")
                found = {}
            yield found

    def _held(self, schema: Any) -> dict[str, Any]:
        """Return the enforced keywords of a schema; refuse keywords that cannot be enforced."""
        if schema is False:
            self._refuse("false")
        if not isinstance(schema, dict):
            return {}
        if unheld := schema.keys() & _UNHELD:
            self._refuse(min(unheld))
        return {name: schema[name] for name in schema if name in _HELD}

    def _are_of_different_types(self, schemas: list[Any]) -> bool:
        types = [kinds(schema, self._root) for schema in schemas]
        return len(frozenset().union(*types)) == sum(map(len, types))

    def _target(self, reference: str) -> Any:
        found = target(reference, self._root)
        if not isinstance(found, dict) or not reference.startswith("#"):
            self._refuse(f"$ref: {reference[:100]!r} is not a place in this schema")
        return found

    def _check(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        if schema.keys() - known:
            self._refuse(min(schema.keys() - known))

    def _refuse(self, what: str) -> None:
        if self._function.is_strict:
            raise InvalidRequest(
                "tools", f"{self._function.name}: {what}: calls of {self._form.name} are not held to that"
            )

    def _types(self, branch: Mapping[str, Any]) -> list[str]:
        found = kinds(branch, self._root)
        return sorted(found - {"integer"} if "number" in found else found)

    # -- values ----------------------------------------------------------------------------------------------

    def _json(self, branch: Mapping[str, Any], kind: str) -> str:
        """Return the name of a rule for a value of this type, written as JSON."""
        is_lenient = not self._function.is_strict
        options = {"lenient": is_lenient, "coerce_one_of": is_lenient or self._function.coerce_one_of, **_SPACING}
        branch = {**branch, "type": kind}
        schema = _moved(branch)
        if schema != branch:  # the branch has references, which are relative to the whole schema
            root = {name: inner for name, inner in self._root.items() if name not in ("$id", "id")}
            schema["$defs"] = {_ROOT: _moved(root)}
        return self._rules.shared(lark_prepared(schema, **options))

    def _until(self, pattern: str, mark: str) -> str:
        """Return the name of a rule for text of this pattern, up to and including a mark."""
        behind = self._rules.text(mark)
        terminal = self._rules.shared(f"{pattern} & ~/{ANY}{escaped(mark)}{ANY}/", is_terminal=True)
        return self._rules.shared(f"{terminal} {behind}", is_lazy=behind.startswith('"'))

    def _patterns(self, branch: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the regular expressions that a string of this branch must all match."""
        low, high = branch.get("minLength", 0), branch.get("maxLength", "")
        if max(low, high or 0) > _MAX_LENGTH:
            self._refuse(f"a length above {_MAX_LENGTH}")
            low, high = 0, ""
        found = [f"(.|\\n){{{low},{high}}}"] if low or high != "" else []
        found += [_FORMATS[branch["format"]]] if "format" in branch else []
        if body := branch.get("pattern"):
            flat = re.sub(r"\[(\\.|[^\]])*\]|\\.", "x", body)
            while (inner := re.sub(r"\([^()]*\)", "x", flat)) != flat:
                flat = inner
            if "|" in flat or set("^$") & set(flat[1:-1]):
                self._refuse("pattern: one with anchors or alternatives side by side")
                return tuple(found)
            ends = "" if flat.startswith("^") else ANY, "" if flat.endswith("$") else ANY
            body = body[not ends[0] : len(body) - (not ends[1])]
            found.append(f"{ends[0]}({slashed(body)}){ends[1]}")
        self._check(branch, _OF_STRINGS | _OF_OTHERS | {"type"})
        return tuple(found)


class _Tagged(_Arguments):
    """Builds rules for values written as text up to a mark. If the schema allows strings and another type, a value that
    begins like the other type is parsed as that type."""

    key = r'[^<>"\n]{1,255}'

    def _value(self, schema: Any) -> str:
        closer, wanted = self._parameters.after_value, kinds(schema, self._root)
        mark, behind = closer.strip(), self._rules.text(closer)
        ways: list[str] = []
        like_text: list[str] = []  # values of other types, whose text an unconstrained string could match as well
        strings: list[tuple[str, ...]] = []
        excluded = set(wanted & {"array", "object"})
        for branch in self._branches(schema):
            if (values := _values(branch)) is not None:
                texts = {value if isinstance(value, str) else json.dumps(value): value for value in values}
                texts = {text: value for text, value in texts.items() if json.loads(typed(text, wanted)) == value}
                words = [escaped(text) for text, value in texts.items() if isinstance(value, str) and mark not in text]
                strings += [(f"({'|'.join(words)})",)] if words else []
                ways += [f"{json.dumps(text)} {behind}" for text in texts if not isinstance(texts[text], str)]
                continue
            for kind in self._types(branch):
                if kind == "string":
                    strings.append(self._patterns(branch))
                    continue
                if "string" not in wanted or _OF_OTHERS & branch.keys():
                    excluded.add(kind)
                (ways if kind in excluded else like_text).append(f"{self._json(branch, kind)} {behind}")
        if () not in strings:
            ways += like_text
        beginnings = "".join(_BEGINNINGS.get(kind, "") for kind in sorted(excluded))
        without = rf" & ~/{BLANK}[{beginnings}]{ANY}/" if beginnings else ""
        line = "\\n" if self._parameters.trims else ""
        for patterns in dict.fromkeys(strings):
            text = " & ".join(f"/{pattern}{line}/" for pattern in patterns or (ANY,))
            ways.append(f"{self._until(text + without, mark)} {self._rules.text(closer[len(closer.rstrip()) :])}")
        if not ways:
            self._refuse("enum: none of the values can be written")
            return self._value({})
        return f"({' | '.join(dict.fromkeys(ways))})"


class _Python(_Arguments):
    """Builds rules for Python literals: JSON, except for True, False and None."""

    key = r"[A-Za-z_][A-Za-z0-9_]*"

    def _value(self, schema: Any) -> str:
        ways: list[str] = []
        for branch in self._branches(schema):
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
            ways = dict.fromkeys(way for branch in self._branches(schema) for way in self._ways(branch))
            self._rules.lines.append(f"{name}: {' | '.join(ways)}")
        return self._known[key]

    def _ways(self, branch: Mapping[str, Any]) -> Iterator[str]:
        quote = self._parameters.quote
        if (values := _values(branch)) is not None:
            yield from (self._rules.text(self._written(value)) for value in values if quote not in str(value))
            return
        for kind in self._types(branch):
            if kind == "string":
                text = " & ".join(f"/{pattern}/" for pattern in self._patterns(branch) or (ANY,))
                yield f"{self._rules.text(quote)} {self._until(text, quote)}"
            elif kind == "array":
                self._check(branch, frozenset(("type", "items", "minItems", "maxItems")))
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
