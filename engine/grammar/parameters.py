"""The grammar of arguments that are not written as one JSON object: text between marks, or literals (text/tools/formats.py).

Values are held to their schemas as far as such a form goes: strings stand there as they are, up to the mark that ends
them, everything else is JSON or the like. Properties come in the schema's order, and only those that it names, if it
names any. What a form cannot be held to is refused, or left out for a tool that is not strict.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.engine.grammar.json_schema import lark_prepared, prepared
from penstock.engine.grammar.opposites import TYPES, words
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.text.tools.arguments import kinds, typed
from penstock.engine.text.tools.formats import Format, Parameters, ToolSpec
from penstock.engine.text.tools.scan import MAX_DEPTH

ANY = r"(.|\n)*"
_MAX_LENGTH = 2000  # of a string: each character is a state of the lexer, and it has 50,000
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_OTHERS = frozenset(words(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items prefixItems minItems maxItems"
    " properties required additionalProperties patternProperties"
))  # fmt: skip
_SAYS_NOTHING = frozenset(("$defs", "type", "properties", "required", "additionalProperties"))
# What a value of a type begins with, where text could be taken for one.
_BEGINNINGS = {"array": r"\[", "object": r"\{", "integer": "-0-9", "number": "-0-9"}
_KEYS = {"": r'[^<>"\n]{1,255}', '"': r"[A-Za-z_][A-Za-z0-9_]*"}  # what can be written, by `quote`
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_KEY = r"[^\s,:=(){}\[\]<>'\"\\]+"
# Of every format that a pattern does not hold already, some values at least.
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+",
    "uri": r"[a-z][a-z0-9+.\-]*:\/\/[A-Za-z0-9._~:\/?@!$&'()*+,;=\-]+",
    "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+H)?|T[0-9]+(H([0-9]+M)?|M([0-9]+S)?|S))",
}


class ParameterRules:
    """The rules for what one function takes. `text` makes Lark of a fixed text, `lines` are the rules so far.

    `spacing`: of JSON. `is_loose`: written by the model in its own way, so that blanks may stand between signs.
    """

    def __init__(
        self,
        lines: list[str],
        text: Callable[[str], str],
        form: Format,
        function: ToolSpec,
        prefix: str,
        spacing: Mapping[str, Any],
        is_loose: bool,
    ) -> None:
        assert form.parameters is not None
        self._lines, self._text, self._form, self._function = lines, text, form, function
        self._parameters: Parameters = form.parameters
        self._prefix, self._spacing, self._is_loose = prefix, spacing, is_loose
        self._num_rules = 0
        self._known: dict[str, str] = {}  # rules by the reference that they stand for
        schema = {"type": "object", **function.parameters}
        self._root = prepared(schema, "tools", not function.is_strict, function.name, function.coerce_one_of)
        self._gap = "gap " if is_loose else ""

    def all(self) -> str:
        """Lark for what stands between the signs around the arguments."""
        schema = self._followed(self._root)
        self._check(schema, _SAYS_NOTHING)
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
                ways += [self._before(False) + self._between(text) for text in fixed]
                continue
            if "string" in types:
                strings.append(self._patterns(branch) or ())
            for kind in sorted(types - {"string"}):
                held = self._json({**branch, "type": kind} if len(types) > 1 else branch)
                if kind == "boolean" and self._is_loose and "string" not in wanted:
                    held = f'({held} | "True" | "False")'
                if "string" not in wanted or self._parameters.before_text or _OF_OTHERS & branch.keys():
                    excluded.add(kind)
                (ways if kind in excluded else like_text).append(self._before(False) + self._between(held))
        if () not in strings:  # else any text is allowed, and what could be read as one of these as well
            ways += like_text
        beginnings = "".join(_BEGINNINGS.get(kind, "") for kind in sorted(excluded))
        without = rf"[ \t\r\n]*[{beginnings}]{ANY}" if beginnings and not self._parameters.before_text else ""
        for patterns in dict.fromkeys(strings):
            ways.append(self._before(True) + self._string(patterns, without, closer, self._parameters.trims))
        if not ways:
            self._refuse("enum: none of the values can be written")
            return self._tagged({})
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _before(self, is_text: bool) -> str:
        before = (is_text and self._parameters.before_text) or self._parameters.before_value
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
        known = {"array": {"type", "items", "minItems", "maxItems"}, "object": _SAYS_NOTHING}.get(given or "")
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
            ways = [self._literal({"type": kind}) for kind in TYPES]
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
        """The alternatives of a schema: each of one type, an enumeration, or without any constraint. References are
        followed once, and those of literals not at all: they may lead back."""
        if schema is False:
            self._refuse("false")
        seen, found = set() if seen is None else seen, schema if isinstance(schema, dict) else {}
        if "$ref" in found:
            self._check(found, frozenset(("$ref",)))
            if self._parameters.quote:
                yield found
            if self._parameters.quote or found["$ref"] in seen:
                return
            seen.add(found["$ref"])
            found = self._followed(found)
        several = "anyOf" if "anyOf" in found else "allOf" if len(found.get("allOf", ())) == 1 else None
        if several is not None:
            rest = {name: inner for name, inner in found.items() if name != several}
            for member in found[several]:
                inner = member if isinstance(member, dict) else {}
                if any(rest[name] != inner[name] for name in rest.keys() & inner.keys()):
                    self._refuse(f"{several}: beside a keyword that its schemas have as well")
                yield from self._branches({**rest, **inner}, seen)
        elif "enum" in found or "const" in found:
            yield found
        elif isinstance(found.get("type"), list):
            yield from ({**found, "type": kind} for kind in found["type"])
        elif "type" not in found and found.keys() & {*_OF_STRINGS, *_OF_OTHERS, "allOf", "not"}:
            self._refuse(f"{sorted(found)[0]}: without a type")
            yield {}
        else:
            yield found

    def _followed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_DEPTH):
            if "$ref" not in schema:
                break
            name = schema["$ref"].rpartition("/")[2]
            schema = self._root if schema["$ref"] == "#" else self._root["$defs"][name]
        return dict(schema)

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
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        options = {"lenient": not self._function.is_strict, **self._spacing}
        return self._rule(lark_prepared({**branch, **definitions}, **options))

    def _fixed(self, text: str) -> str:
        """As it is, or with blanks where the model has its own way."""
        return " gap ".join(map(self._text, text.split())) if self._is_loose else self._text(text)

    def _rule(self, body: str, *, is_terminal: bool = False, is_lazy: bool = False) -> str:
        name = self._new().upper() if is_terminal else self._new()
        self._lines.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name

    def _new(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}{self._num_rules}"


def _values(branch: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] | None = branch.get("enum", [branch["const"]] if "const" in branch else None)
    return found


def escaped(text: str) -> str:
    """As a regular expression of Lark, between slashes."""
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", "\\n")
