"""A JSON schema as llguidance takes it: what the library would get wrong is rewritten or refused before it sees it.

A schema is read by the meaning of its keywords, so data (enum, const, default) is never taken for schemas. Only what
holds an answer to something is passed on; an unknown keyword, llguidance's own options among them, says
nothing. Every schema that a `$ref` leads to is read too, and stands under `$defs` of what is passed on.

    rewritten   patterns (in ECMA's meaning, ecma.py), dates, times, host names, oneOf of schemas that exclude each
                other, `not` and `if` of simple ones (opposites.py), dependencies, propertyNames, unevaluated…
    refused     what has no exact rewriting, with its keyword and place; a lenient reading leaves it out instead
"""

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urljoin

from penstock.engine.grammar.ecma import UNWRITABLE, translated
from penstock.engine.grammar.endless import ROOT, without_endless
from penstock.engine.grammar.opposites import MANY, At, Exclusion, opposite, subschemas, words
from penstock.engine.sampling_params import InvalidRequest, check_depth

WHITESPACE = r"( |\n[ \t]{0,32})?"  # compact, one space, or indented
# Characters are written as themselves: a name spelled with \u would pass for one that the schema does not hold.
ESCAPES = 'nrbtf\\"'

_COERCED = "with structured_outputs.coerce_one_of or --coerce-one-of it is taken for anyOf"
MAX_BRANCHES = 16  # of one oneOf or minProperties that is rewritten
MAX_DEPENDENCIES = 4  # each doubles the branches
TYPES = words("null boolean number integer string array object")
# Passed on as they are. A number may have any exponent: to bound it would cut 1.6e-19 off at 1.6.
_PLAIN = words(
    "required minLength maxLength minItems maxItems maxProperties"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
)
_COUNTS = words("minLength maxLength minItems maxItems minProperties maxProperties")
_OF_NAMES = words("enum const pattern minLength maxLength")
# With one of these, what is "unevaluated" depends on the value.
_IN_PLACE = words("$ref allOf anyOf oneOf not if dependentSchemas dependencies contains $dynamicRef $recursiveRef")
_LISTS = words("enum required allOf anyOf oneOf prefixItems")
_OBJECTS = words("properties patternProperties dependencies dependentSchemas dependentRequired")

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
# Without leap seconds, which are right in one minute of the day only.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"(?:[^.]{1,3}|[^.]{2}(?:[^.-][^.]|-[^.-])[^.]*)"  # without the two dashes of an encoded one
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253, "pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}


def prepared(
    schema: Any, field: str, lenient: bool = False, name: str = "", coerce_one_of: bool = False
) -> dict[str, Any]:
    """Raises InvalidRequest naming `field`, the keyword and where it stands in the schema called `name`."""
    if isinstance(schema, dict):
        check_depth(field, schema)
    return _Document(schema, field, lenient, f"{name}#", coerce_one_of or lenient).all()


def lark_json(
    schema: Any, field: str, lenient: bool = False, name: str = "", coerce_one_of: bool = False, **options: Any
) -> str:
    """The schema in a rule of Lark. `options` are llguidance's."""
    return lark_prepared(prepared(schema, field, lenient, name, coerce_one_of), lenient=lenient, **options)


def lark_prepared(schema: dict[str, Any], **options: Any) -> str:
    text = json.dumps({**schema, "x-guidance": {"json_allowed_escapes": ESCAPES, **options}}, ensure_ascii=False)
    return "%json " + text.replace("::=", ":\\u003a=")  # which in a grammar is taken for another dialect


class _NotHeld(Exception):
    """A keyword that no grammar holds an answer to."""


class _Document:
    def __init__(self, schema: Any, field: str, lenient: bool, place: str, coerces: bool) -> None:
        self._root, self._field, self._lenient, self._place = schema, field, lenient, place
        self._coerces = coerces
        self._resources: dict[str, Any] = {"": schema}  # by URI, and by URI and anchor
        self._names: dict[str, str] = {}  # absolute reference → name under $defs; the root's is ""
        self._pending: list[tuple[str, Any, str]] = []  # name, schema, the URI that references in it are relative to
        self._exclusion = Exclusion(self._target)

    def all(self) -> dict[str, Any]:
        self._register(self._root, "")
        if not _is_reference(self._root):
            self._names[_base(self._root, "")] = ""
        found = self._schema(self._root, "", self._place)
        definitions: dict[str, Any] = {}
        while self._pending:  # not by recursion: a chain of references may be as long as the text
            name, schema, base = self._pending.pop()
            definitions[name] = self._schema(schema, base, f"{self._place}/$defs/{name}")
        if isinstance(found, bool):
            found = {} if found else {"enum": []}
        by_reference = {ROOT: found, **{f"#/$defs/{name}": inner for name, inner in definitions.items()}}
        # Of a lenient reading llguidance says that nothing keeps to it.
        if not without_endless(by_reference) and not self._lenient:
            raise InvalidRequest(self._field, f"{self._place}: it requires itself, so that no answer could ever end")
        return {"$defs": definitions, **found} if definitions else found

    # -- references ----------------------------------------------------------------------------------------

    def _register(self, schema: Any, base: str) -> None:
        """Which schemas have a URI or an anchor of their own."""
        if not isinstance(schema, dict):
            return
        base = _base(schema, base)
        self._resources.setdefault(base, schema)
        for name in ("$anchor", "$id", "id"):
            if isinstance(given := schema.get(name), str):
                anchor = given if name == "$anchor" else given.partition("#")[2]
                self._resources.setdefault(f"{base}#{anchor}", schema)
        for inner in subschemas(schema):
            self._register(inner, base)

    def _target(self, reference: str, base: str) -> tuple[Any, str]:
        """What a reference leads to, and the URI around it. Raises LookupError, ValueError or TypeError."""
        absolute = _absolute(reference, base)
        url, _, fragment = absolute.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._resources[absolute], url
        found = self._resources[url]
        for part in unquote(fragment).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            url = _base(found, url)
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found, url

    def _reference(self, reference: str, base: str) -> str:
        """Where the schema that is meant stands in what is passed on."""
        absolute = _absolute(reference, base).removesuffix("#")
        if absolute not in self._names:
            found, url = self._followed(reference, base)
            name = re.sub("[^A-Za-z0-9_]", "_", re.split("[/#]", absolute)[-1]) or "root"
            name = name if name not in self._names.values() else f"{name}_{len(self._names)}"
            self._names[absolute] = name
            self._pending.append((name, found, url))
        return f"#/$defs/{self._names[absolute]}" if self._names[absolute] else "#"

    def _followed(self, reference: str, base: str) -> tuple[Any, str]:
        seen = set()
        while (reference, base) not in seen:
            seen.add((reference, base))
            try:
                found, base = self._target(reference, base)
            except (LookupError, ValueError, TypeError):
                raise _NotHeld(f"{reference[:100]!r} is not in this document") from None
            if not _is_reference(found):
                return found, base
            reference = found["$ref"]
        raise _NotHeld("it leads to nothing but itself")

    # -- schemas -------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, base: str, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            if self._lenient:
                return True
            what = type(schema).__name__
            raise InvalidRequest(self._field, f"{place}: {what} given; a schema is an object, true or false")
        base = _base(schema, base)
        held: dict[str, Any] = {}
        sound = {keyword: value for keyword, value in schema.items() if _has_its_shape(keyword, value)}
        for keyword, value in schema.items():
            try:
                if keyword not in sound:
                    raise _NotHeld(f"{type(value).__name__} given, which it does not take")
                also = self._keyword(keyword, value, sound, held, At(place, base))
            except _NotHeld as why:
                if not self._lenient:
                    raise InvalidRequest(self._field, f"{place}: {keyword}: {why}") from None
                continue
            if also:
                held["allOf"] = held.get("allOf", []) + [self._schema(inner, base, place) for inner in also]
        return held

    def _keyword(self, keyword: str, value: Any, schema: dict[str, Any], held: dict[str, Any], at: At) -> list[Any]:
        """Put into `held` what the library takes; returned are schemas that say the same as the keyword."""
        place, base = f"{at.schema}/{keyword}", at.base
        if keyword in _PLAIN:
            held[keyword] = int(value) if keyword in _COUNTS else value
        elif keyword in ("const", "enum"):
            held[keyword] = _values(keyword, value)
        elif keyword == "type":
            held[keyword] = _type(value)
        elif keyword == "$ref":
            if {"$id", "id"} & schema.keys() and at.schema != self._place:
                raise _NotHeld("beside an $id it means one thing in draft 7 and another since")
            held[keyword] = self._reference(value, base)
        elif keyword == "pattern":
            held[keyword] = _pattern(value)
        elif keyword == "format":
            found = _FORMATS.get(value, {}) if isinstance(value, str) else {}
            held.update({name: inner for name, inner in found.items() if name == "format" or name not in schema})
            return [{name: inner} for name, inner in found.items() if name != "format" and name in schema]
        elif keyword == "properties":
            held[keyword] = {name: self._schema(inner, base, f"{place}/{name}") for name, inner in value.items()}
        elif keyword == "patternProperties":
            held[keyword] = {
                _pattern(name): self._schema(inner, base, f"{place}/{name}") for name, inner in value.items()
            }
        elif keyword in MANY - {"oneOf"} and isinstance(value, list):
            inner = [self._schema(member, base, f"{place}/{index}") for index, member in enumerate(value)]
            held[keyword] = held.get(keyword, []) + inner
        elif keyword in ("items", "additionalProperties") or (
            keyword == "additionalItems" and isinstance(schema.get("items"), list)
        ):
            held[keyword] = self._schema(value, base, place)
        elif keyword == "minProperties":
            return _min_properties(value, schema, held)
        elif keyword == "oneOf":
            return self._one_of(value, schema, base)
        elif keyword in _REWRITTEN:
            return _REWRITTEN[keyword](value, schema)
        return []

    def _one_of(self, members: list[Any], schema: dict[str, Any], base: str) -> list[Any]:
        """As anyOf, where no value can keep to two of them. One that could keeps away from the other's values; if it
        has no opposite, all may hold where the user has said so."""
        # What stands beside the oneOf and may distinguish its schemas.
        names = ("type", "properties", "required", "additionalProperties")
        beside = {name: schema[name] for name in names if name in schema}
        branches = []
        for index, member in enumerate(members):
            others = [
                opposite(other)
                for number, other in enumerate(members)
                if number != index
                and not self._exclusion.between(At({**beside, "allOf": [member]}, base), At({"allOf": [other]}, base))
            ]
            if None in others or (others and len(members) > MAX_BRANCHES):
                if self._coerces:
                    return [{"anyOf": members}]
                raise _NotHeld(f"two of its schemas can hold for the same value; {_COERCED}")
            branches.append({"allOf": [member, *others]} if others else member)
        return [{"anyOf": branches}]


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() == {"$ref"} and isinstance(schema["$ref"], str)


def _absolute(reference: str, base: str) -> str:
    if reference[:1] in ("", "#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:  # an address that cannot be one
        return reference


def _base(schema: Any, base: str) -> str:
    given = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
    return _absolute(given, base).partition("#")[0] if isinstance(given, str) and given[:1] != "#" else base


def _type(value: Any) -> Any:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in TYPES:
            raise _NotHeld(f"{str(name)[:40]!r} is no type of JSON")
    return value


def _values(keyword: str, value: Any) -> Any:
    """Those that can be written."""
    values = value if keyword == "enum" else [value]
    found = [value for value in values if UNWRITABLE.isdisjoint(_text(value))]
    if not found:
        raise _NotHeld("there is no value that could be written")
    return found if keyword == "enum" else value


def _text(value: Any) -> str:
    """All the text in it."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(key + _text(inner) for key, inner in value.items())
    return "".join(map(_text, value)) if isinstance(value, list) else ""


def _pattern(value: str) -> str:
    try:
        return translated(value)
    except ValueError as why:
        raise _NotHeld(str(why)) from None


def _has_its_shape(keyword: str, value: Any) -> bool:
    if keyword in _LISTS:
        return isinstance(value, list) and (keyword != "required" or all(isinstance(name, str) for name in value))
    if keyword in _OBJECTS:
        return isinstance(value, dict)
    if keyword in _COUNTS:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1 >= 0
    if keyword in ("$ref", "pattern"):
        return isinstance(value, str)
    return keyword not in ("not", "if", "propertyNames") or isinstance(value, (dict, bool))


def _min_properties(value: int, schema: dict[str, Any], held: dict[str, Any]) -> list[Any]:
    """One more than are required is all that can be held: of two more, the second may have the name of the first."""
    required = set(schema.get("required", ()))
    properties = schema.get("properties", {})
    num_missing = int(value) - len(required)
    if num_missing <= 0:
        return []
    optional = [name for name, inner in properties.items() if name not in required and inner is not False]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if num_missing > 1:
        if is_closed and len(optional) == num_missing:
            return [{"required": optional}]
        raise _NotHeld("nothing here counts two properties more than are required, of which one may repeat the other")
    if len(optional) > MAX_BRANCHES:
        raise _NotHeld(f"it is held beside at most {MAX_BRANCHES} properties that are not required")
    if not optional:
        held["minProperties"] = int(value)
        return []
    unlisted = {"minProperties": value, "required": sorted(required), "properties": dict.fromkeys(optional, False)}
    return [{"anyOf": [{"required": [name]} for name in optional] + ([] if is_closed else [unlisted])}]


def _unique(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True and schema.get("maxItems", 2) > 1:
        raise _NotHeld("what stood in an array before is not remembered")
    return []


def _contains(_value: Any, schema: dict[str, Any]) -> list[Any]:
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        return []
    raise _NotHeld("which items an array holds is not counted")


def _not(value: Any, _schema: dict[str, Any]) -> list[Any]:
    found = opposite(value)
    if found is None:
        raise _NotHeld("only simple schemas have an opposite here")
    return [] if found is True else [found]


def _if(value: Any, schema: dict[str, Any]) -> list[Any]:
    if "then" not in schema and "else" not in schema:
        return []
    found = opposite(value)
    if found is None:
        raise _NotHeld("only simple schemas have an opposite here")
    return [{"anyOf": [{"allOf": [value, schema.get("then", True)]}, {"allOf": [found, schema.get("else", True)]}]}]


def _property_names(value: Any, _schema: dict[str, Any]) -> list[Any]:
    if value is False:
        return [{"maxProperties": 0}]
    given = {} if value is True else {name: inner for name, inner in value.items() if name in _OF_NAMES}
    ignored = {"type", "title", "description", "$comment", "default", "examples"}
    if value is not True and (set(value) - set(given) - ignored or value.get("type", "string") != "string"):
        raise _NotHeld("only an enumeration, a pattern or a length of names is held")
    if not all(_has_its_shape(keyword, inner) for keyword, inner in given.items()):
        raise _NotHeld("one of its keywords does not take what it is given")
    found: list[Any] = []
    for keyword, inner in given.items():
        if keyword in ("enum", "const"):
            names = [name for name in (inner if keyword == "enum" else [inner]) if isinstance(name, str)]
            found.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
        else:
            bound = inner if keyword == "pattern" else f"{int(inner)}," if keyword == "minLength" else f"0,{int(inner)}"
            pattern = inner if keyword == "pattern" else f"^[\\s\\S]{{{bound}}}$"
            found.append({"patternProperties": {pattern: True}, "additionalProperties": False})
    return found


def _dependencies(value: Any, _schema: dict[str, Any]) -> list[Any]:
    if len(value) > MAX_DEPENDENCIES:
        raise _NotHeld(f"at most {MAX_DEPENDENCIES} dependencies are held")
    return [
        {"anyOf": [{"properties": {name: False}}, {"required": inner} if isinstance(inner, list) else inner]}
        for name, inner in value.items()
    ]


def _unevaluated_properties(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True or "additionalProperties" in schema:
        return []
    if _IN_PLACE & schema.keys():
        raise _NotHeld("which properties have been looked at is not remembered")
    known = {name: dict.fromkeys(schema[name], True) for name in ("properties", "patternProperties") if name in schema}
    return [{**known, "additionalProperties": value}]


def _unevaluated_items(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True or ("items" in schema and not isinstance(schema["items"], list)):
        return []
    if _IN_PLACE & schema.keys() or "items" in schema:
        raise _NotHeld("which items have been looked at is not remembered")
    return [{"prefixItems": [True] * len(schema.get("prefixItems", ())), "items": value}]


def _never(why: str) -> Callable[[Any, dict[str, Any]], list[Any]]:
    def refuse(_value: Any, _schema: dict[str, Any]) -> list[Any]:
        raise _NotHeld(why)

    return refuse


_REWRITTEN: dict[str, Callable[[Any, dict[str, Any]], list[Any]]] = {
    "uniqueItems": _unique,
    "contains": _contains,
    "not": _not,
    "if": _if,
    "propertyNames": _property_names,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), _never("what it leads to is not known beforehand")),
    **dict.fromkeys(("extends", "disallow", "divisibleBy"), _never("draft 3 is not known")),
}
