"""The grammar of arguments that are not written as one JSON object: text between marks, or literals (text/tools/formats.py).

Values are held to their schemas as far as such a form goes: strings stand there as they are, up to the mark that ends
them, everything else is JSON or the like. Properties come in the schema's order, and only those that it names, if it
names any. What a form cannot be held to is refused, or left out for a tool that is not strict.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from penstock.engine.grammar.json_schema import lark_prepared, prepared
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.tools.arguments import kinds, typed
from penstock.engine.text.tools.formats import Format, Parameters, ToolSpec
from penstock.engine.text.tools.scan import MAX_DEPTH

ANY = r"(.|\n)*"
_MAX_LENGTH = 2000  # of a string: each character is a state of the lexer, and it has 50,000
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
_OF_OTHERS = frozenset((
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
))  # fmt: skip
# All keywords that llguidance holds an answer to; the rest of a schema are annotations and definitions.
_KEYWORDS = _OF_STRINGS | _OF_OTHERS | {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
# Keywords that llguidance does not enforce.
_UNHELD = frozenset((
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
))  # fmt: skip
_OF_ARGUMENTS = frozenset(("type", "properties", "required", "additionalProperties"))
# What a value of a type begins with, where text could be taken for one.
_BEGINNINGS = {"array": r"\[", "object": r"\{", "integer": "-0-9", "number": "-0-9"}
_KEYS = {"": r'[^<>"\n]{1,255}', '"': r"[A-Za-z_][A-Za-z0-9_]*"}  # what can be written, by `quote`
_ROOT = "arguments"  # the name of the whole schema beside one of its parts
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_KEY = r"[^\s,:=(){}\[\]<>'\"\\]+"
# Some values of every format; of wrong ones only 29 February in other years, which llguidance takes as well.
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


class ParameterRules:
    """The rules for what one function takes. `text` makes Lark of a fixed text, `lines` are the rules so far, and `shared`
    the names of rules that other functions may use as well, by their bodies.

    `spacing`: of JSON. `is_loose`: written by the model in its own way, so that blanks may stand between signs.
    """

    def __init__(
        self,
        lines: list[str],
        shared: dict[str, str],
        text: Callable[[str], str],
        form: Format,
        function: ToolSpec,
        prefix: str,
        spacing: Mapping[str, Any],
        is_loose: bool,
    ) -> None:
        assert form.parameters is not None
        self._lines, self._shared, self._text, self._form, self._function = lines, shared, text, form, function
        self._parameters: Parameters = form.parameters
        self._prefix, self._spacing, self._is_loose = prefix, spacing, is_loose
        self._num_rules = 0
        self._known: dict[str, str] = {}  # rules by the reference that they stand for
        schema = {"type": "object", **function.parameters}
        self._root = prepared(schema, "tools", not function.is_strict, function.name)
        self._gap = "gap " if is_loose else ""

    def all(self) -> str:
        """Lark for what stands between the signs around the arguments."""
        schema = self._followed(self._held(self._root))
        self._check(schema, _OF_ARGUMENTS)
        parameters, pairs = self._parameters, []
        for name, inner, is_needed in self._properties(schema, _KEYS.get(parameters.quote, _KEY)):
            if parameters.quote:
                pair = f"{self._text(name + parameters.before_value)} {self._gap}{self._value(inner)}"
            else:
                pair = f"{self._fixed(parameters.before_key)} {self._text(name)} {self._tagged(inner)}"
            pairs.append((pair, is_needed))
        others = schema.get("additionalProperties", True)
        if pairs or others is False:
            return self._members(pairs) if parameters.quote else self._tags(pairs)
        name = f"{self._fixed(parameters.before_key)} {_ANY_NAME}"
        if not parameters.quote:
            return f"({self._gap}{name} {self._tagged(others)})*"
        pair = self._rule(f"{name} {self._text(parameters.before_value)} {self._gap}{self._value(others)}")
        return f"({pair} ({self._comma()} {pair})*)?"

    # -- names -----------------------------------------------------------------------------------------------

    def _properties(self, schema: Mapping[str, Any], writable: str) -> Iterator[tuple[str, Any, bool]]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = {name: schema.get("additionalProperties", True) for name in required if name not in properties}
        for name, inner in {**properties, **others}.items():
            if not re.fullmatch(writable, name) and name in required:
                self._refuse(f"required: {name!r} cannot be written as a name")
            elif re.fullmatch(writable, name) and inner is not False:
                yield name, inner, name in required

    def _tags(self, pairs: list[tuple[str, bool]]) -> str:
        return " ".join(f"({self._gap}{pair}){'' if is_needed else '?'}" for pair, is_needed in pairs) + f" {self._gap}"

    def _members(self, pairs: list[tuple[str, bool]]) -> str:
        """Members with commas between them, those that are needed and any of the others."""
        rest, num_needed = "", 0
        ways: list[str] = []
        for pair, is_needed in reversed(pairs):
            num_needed += is_needed
            ways = [f"{pair} {rest}", *([] if is_needed else ways)]
            rest = self._rule(f"({self._comma()} {pair}){'' if is_needed else '?'} {rest}")
        return f"({' | '.join(ways)}){'' if num_needed else '?'}" if ways else ""

    def _comma(self) -> str:
        return 'gap "," gap' if self._is_loose else json.dumps(self._parameters.join)

    # -- values ----------------------------------------------------------------------------------------------

    def _tagged(self, schema: Any) -> str:
        """A value between marks, with the mark behind it. What begins like JSON is read as that, where it may be."""
        closer, wanted = self._parameters.after_value, kinds(schema, self._root)
        mark, like_text = closer.strip(), list[str]()
        ways: list[str] = []
        strings: list[tuple[str, ...]] = []
        excluded = set(wanted & {"array", "object"})
        for branch in self._branches(schema):
            types = kinds(branch, self._root)
            if (values := _values(branch)) is not None:
                texts = {
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False): value
                    for value in values
                }
                texts = {text: value for text, value in texts.items() if json.loads(typed(text, wanted)) == value}
                if found := [
                    escaped(text) for text, value in texts.items() if isinstance(value, str) and mark not in text
                ]:
                    strings.append((f"({'|'.join(found)})",))
                fixed = (json.dumps(text) for text, value in texts.items() if not isinstance(value, str))
                ways += [self._before() + self._between(text) for text in fixed]
                continue
            if "string" in types:
                strings.append(self._patterns(branch) or ())
            for kind in sorted(types - {"string"}):
                held = self._json({**branch, "type": kind} if len(types) > 1 else branch)
                if kind == "boolean" and self._is_loose and "string" not in wanted:
                    held = f'({held} | "True" | "False")'
                if "string" not in wanted or _OF_OTHERS & branch.keys():
                    excluded.add(kind)
                (ways if kind in excluded else like_text).append(self._before() + self._between(held))
        if () not in strings:  # else any text is allowed, and what could be read as one of these as well
            ways += like_text
        beginnings = "".join(_BEGINNINGS.get(kind, "") for kind in sorted(excluded))
        without = rf"[ \t\r\n]*[{beginnings}]{ANY}" if beginnings else ""
        for patterns in dict.fromkeys(strings):
            ways.append(self._before() + self._string(patterns, without, closer, self._parameters.trims))
        if not ways:
            self._refuse("enum: none of the values can be written")
            return self._tagged({})
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _before(self) -> str:
        before = self._parameters.before_value
        return self._fixed(before if not self._is_loose else before.rstrip("\n")) + " "

    def _between(self, value: str) -> str:
        """A value that is not followed to its mark as text is."""
        if self._is_loose:
            return f"gap {value} gap {self._fixed(self._parameters.after_value)}"
        return f"{value} {self._text(self._parameters.after_value)}"

    def _string(self, patterns: tuple[str, ...], without: str, closer: str, trims: bool) -> str:
        """Text up to what ends it, which is not part of it."""
        mark = closer.strip()
        breaks = ("\\n" if trims and self._is_loose else "", "\\n" if trims else "")
        found = " & ".join(f"/{breaks[0]}{pattern}{breaks[1]}/" for pattern in patterns) or f"/{ANY}/"
        found += f" & ~/{ANY}{escaped(mark)}{ANY}/" + (f" & ~/{without}/" if without else "")
        terminal = self._rule(found, is_terminal=True)
        behind = self._text(mark)
        rule = self._rule(f"{terminal} {behind}", is_lazy=behind.startswith('"'))
        rest = closer[len(closer.rstrip()) :] if not self._is_loose else ""
        return f"{rule} {self._text(rest)}".rstrip()

    def _patterns(self, branch: Mapping[str, Any], *, is_needed: bool = True) -> tuple[str, ...] | None:
        """Regular expressions that a string must match, all of them; None: what holds it is more than that."""
        low, high = branch.get("minLength", 0), branch.get("maxLength", "")
        more = branch.keys() - {"type", *_OF_STRINGS} - _OF_OTHERS
        if max(low, high or 0) > _MAX_LENGTH:
            more = {f"a length above {_MAX_LENGTH}"}
        found = [f"(.|\\n){{{low},{high}}}"] if low or high != "" else []
        if "format" in branch:
            found.append(_FORMATS[branch["format"]])
        if body := branch.get("pattern"):
            flat = re.sub(r"\[(\\.|[^\]])*\]|\\.", "x", body)
            while (inner := re.sub(r"\([^()]*\)", "x", flat)) != flat:
                flat = inner
            if "|" in flat or set("^$") & set(flat[1:-1]):
                more = {"pattern: one with anchors or alternatives side by side"}
            ends = "" if flat.startswith("^") else ANY, "" if flat.endswith("$") else ANY
            body = body[not ends[0] : len(body) - (not ends[1])]
            found.append(ends[0] + "(" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", body) + ")" + ends[1])
        if more and is_needed:
            self._refuse(min(more))
        return None if more else tuple(found)

    def _value(self, schema: Any) -> str:
        """A literal."""
        return self._rule(" | ".join(dict.fromkeys(map(self._literal, self._branches(schema)))))

    def _reference(self, reference: str) -> str:
        if reference not in self._known:  # known before its body, which may contain it
            name = self._known[reference] = self._new()
            self._lines.append(f"{name}: {self._value(self._followed({'$ref': reference}))}")
        return self._known[reference]

    def _literal(self, branch: Mapping[str, Any]) -> str:
        is_python, quote = self._parameters.quote == '"', self._parameters.quote
        if (values := _values(branch)) is not None:
            texts = [self._written(value) for value in values if is_python or quote not in str(value)]
            if is_python:
                texts += [f"'{value}'" for value in values if isinstance(value, str) and not set(value) & set("'\\\n")]
            return " | ".join(map(self._text, texts))
        if "$ref" in branch:
            return self._reference(branch["$ref"])
        given = branch.get("type")
        if given == "string":
            if not is_python:
                return f"{self._text(quote)} {self._string(self._patterns(branch) or (), '', quote, trims=False)}"
            patterns = self._patterns(branch, is_needed=False)
            if patterns is None:
                return self._json(branch)
            single = r"/'([^'\\\n]|\\[nrtbf'\"\\])*'/"
            if patterns:
                held = " & ".join(f"/'{pattern}'/" for pattern in patterns)
                single = self._rule(rf"{held} & ~/'{ANY}['\\\n]{ANY}'/", is_terminal=True)
            return f"{self._json(branch)} | {single}"
        if given in ("integer", "number"):
            return self._json(branch)
        if given in ("boolean", "null"):
            words = ("true", "false", "True", "False") if given == "boolean" else ("null", "None")
            return " | ".join(json.dumps(word) for word in words)
        known = {"array": {"type", "items", "minItems", "maxItems"}, "object": _OF_ARGUMENTS}.get(given or "")
        if known is None:
            return self._anything()
        if is_python and branch.keys() - known:
            return self._json(branch)
        self._check(branch, frozenset(known))
        return self._array(branch) if given == "array" else self._object(branch)

    def _array(self, branch: Mapping[str, Any]) -> str:
        item = self._rule(self._value(branch.get("items", True)))
        low, high = branch.get("minItems", 0), branch.get("maxItems")
        if high == 0:
            return f'"[" {self._gap}"]"'
        more = f"({self._comma()} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        return f'"[" {self._gap}({item} {more}){"" if low else "?"} {self._gap}"]"'

    def _object(self, branch: Mapping[str, Any]) -> str:
        is_python = self._parameters.quote == '"'
        colon = f"{self._gap}{json.dumps(': ' if is_python and not self._is_loose else ':')} {self._gap}"
        pairs = []
        for name, inner, is_needed in self._properties(branch, ANY if is_python else _KEY):
            written = f"({self._literal({'const': name})})" if is_python else self._text(name)
            pairs.append((f"{written} {colon}{self._value(inner)}", is_needed))
        others = branch.get("additionalProperties", True)
        members = self._members(pairs)
        if not pairs and others is not False:
            name = f"({self._literal({'type': 'string'})})" if is_python else _ANY_NAME
            pair = self._rule(f"{name} {colon}{self._value(others)}")
            members = f"({pair} ({self._comma()} {pair})*)?"
        return f'"{{" {self._gap}{members} {self._gap}"}}"'

    def _anything(self) -> str:
        name = f"{self._prefix}any"
        if name not in self._known:
            self._known[name] = name
            ways = [self._literal({"type": kind}) for kind in _TYPES]
            self._lines.append(f"{name}: {' | '.join(ways)}")
        return name

    def _written(self, value: Any) -> str:
        """A value in an enumeration."""
        quote, join = self._parameters.quote, self._parameters.join
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if quote == '"' else quote + value + quote
        if isinstance(value, list):
            return f"[{join.join(map(self._written, value))}]"
        if isinstance(value, dict):
            members = join.join(f"{self._written(name)}:{self._written(inner)}" for name, inner in value.items())
            return f"{{{members}}}"
        return str(value) if quote == '"' else json.dumps(value)

    # -- schemas ---------------------------------------------------------------------------------------------

    def _branches(self, schema: Any, seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema: each of one type, an enumeration, or without any constraint.

        References are followed once, and those of literals not at all: they may lead back. A oneOf is read as anyOf if its
        schemas are of different types.
        """
        if schema is False:
            self._refuse("false")
        seen, found = set() if seen is None else seen, self._held(schema)
        if "$ref" in found:
            self._check(found, frozenset(("$ref",)))
            if self._parameters.quote:
                yield found
            if self._parameters.quote or found["$ref"] in seen:
                return
            seen.add(found["$ref"])
            found = self._followed(found)
        several: str | None = next((name for name in ("anyOf", "oneOf") if name in found), None)
        if several is None and len(found.get("allOf", ())) == 1:
            several = "allOf"
        if several == "oneOf" and not self._function.coerce_one_of and not self._are_of_different_types(found["oneOf"]):
            self._refuse("oneOf: two of its schemas can hold for the same value")
        if several is not None:
            rest = {name: inner for name, inner in found.items() if name != several}
            for member in found[several]:
                inner = self._held(member)
                if any(rest[name] != inner[name] for name in rest.keys() & inner.keys()):
                    self._refuse(f"{several}: beside a keyword that its schemas have as well")
                yield from self._branches({**rest, **inner}, seen)
        elif "enum" in found or "const" in found:
            yield found
        elif isinstance(found.get("type"), list):
            yield from ({**found, "type": kind} for kind in found["type"])
        elif "type" not in found and found:
            self._refuse(f"{sorted(found)[0]}: without a type")
            yield {}
        else:
            yield found

    def _held(self, schema: Any) -> dict[str, Any]:
        """Return the keywords that hold a value to something."""
        if not isinstance(schema, dict):
            return {}
        if unheld := schema.keys() & _UNHELD:
            self._refuse(min(unheld))
        return {name: schema[name] for name in schema if name in _KEYWORDS}

    def _are_of_different_types(self, schemas: list[Any]) -> bool:
        found: set[str] = set()
        for schema in schemas:
            types = kinds(schema, self._root)
            if found & types:
                return False
            found |= types
        return True

    def _followed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema that a chain of references leads to; one without constraints if it leads nowhere."""
        for _ in range(MAX_DEPTH):
            if "$ref" not in schema:
                return dict(schema)
            schema = self._held(self._target(schema["$ref"]))
        return {}

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (LookupError, ValueError, TypeError):
                found = None
        if not isinstance(found, dict) or not reference.startswith("#"):
            self._refuse(f"$ref: {reference[:100]!r} is not a place in this schema")
        return found

    def _check(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        if schema.keys() - known:
            self._refuse(sorted(schema.keys() - known)[0])

    def _refuse(self, what: str) -> None:
        if self._function.is_strict:
            raise InvalidRequest(
                "tools", f"{self._function.name}: {what}: calls of {self._form.name} are not held to that"
            )

    # -- rules -----------------------------------------------------------------------------------------------

    def _json(self, branch: Mapping[str, Any]) -> str:
        function = self._function
        is_lenient = not function.is_strict
        options = {"lenient": is_lenient, "coerce_one_of": is_lenient or function.coerce_one_of, **self._spacing}
        schema = _moved(branch)
        if schema != branch:  # it has references, which are relative to the whole schema
            root = {name: inner for name, inner in self._root.items() if name not in ("$id", "id")}
            schema["$defs"] = {_ROOT: _moved(root)}
        return self._rule(lark_prepared(schema, **options))

    def _fixed(self, text: str) -> str:
        """As it is, or with blanks where the model has its own way."""
        return " gap ".join(map(self._text, text.split())) if self._is_loose else self._text(text)

    def _rule(self, body: str, *, is_terminal: bool = False, is_lazy: bool = False) -> str:
        """Return the name of a rule with this body. Functions share equal rules: with a hundred of them, separate terminals
        would exceed what llguidance's lexer may cost."""
        key = f"{is_terminal} {is_lazy} {body}"
        if key not in self._shared:
            name = self._new().upper() if is_terminal else self._new()
            self._lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
            self._shared[key] = name
        return self._shared[key]

    def _new(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}{self._num_rules}"


def _moved(schema: Any) -> Any:
    """Return a copy whose references lead to the same places when the whole schema stands under `$defs`."""
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


def escaped(text: str) -> str:
    """As a regular expression of Lark, between slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", "\\n")
