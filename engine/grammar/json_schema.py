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
from typing import Any
from urllib.parse import unquote, urljoin

from penstock.engine.grammar.endless import ROOT, without_endless
from penstock.engine.grammar.keywords import (
    COUNTS,
    FORMATS,
    MAX_BRANCHES,
    PLAIN,
    REWRITTEN,
    NotHeld,
    has_its_shape,
    min_properties,
    pattern_of,
    type_of,
    written_values,
)
from penstock.engine.grammar.opposites import MANY, At, Exclusion, opposite, subschemas
from penstock.engine.sampling_params import InvalidRequest, check_depth

WHITESPACE = r"( |\n[ \t]{0,32})?"  # compact, one space, or indented
# Characters are written as themselves: a name spelled with \u would pass for one that the schema does not hold.
ESCAPES = 'nrbtf\\"'

_COERCED = "with structured_outputs.coerce_one_of or --coerce-one-of it is taken for anyOf"


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
                raise NotHeld(f"{reference[:100]!r} is not in this document") from None
            if not _is_reference(found):
                return found, base
            reference = found["$ref"]
        raise NotHeld("it leads to nothing but itself")

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
        sound = {keyword: value for keyword, value in schema.items() if has_its_shape(keyword, value)}
        for keyword, value in schema.items():
            try:
                if keyword not in sound:
                    raise NotHeld(f"{type(value).__name__} given, which it does not take")
                also = self._keyword(keyword, value, sound, held, At(place, base))
            except NotHeld as why:
                if not self._lenient:
                    raise InvalidRequest(self._field, f"{place}: {keyword}: {why}") from None
                continue
            if also:
                held["allOf"] = held.get("allOf", []) + [self._schema(inner, base, place) for inner in also]
        return held

    def _keyword(self, keyword: str, value: Any, schema: dict[str, Any], held: dict[str, Any], at: At) -> list[Any]:
        """Put into `held` what the library takes; returned are schemas that say the same as the keyword."""
        place, base = f"{at.schema}/{keyword}", at.base
        if keyword in PLAIN:
            held[keyword] = int(value) if keyword in COUNTS else value
        elif keyword in ("const", "enum"):
            held[keyword] = written_values(keyword, value)
        elif keyword == "type":
            held[keyword] = type_of(value)
        elif keyword == "$ref":
            if {"$id", "id"} & schema.keys() and at.schema != self._place:
                raise NotHeld("beside an $id it means one thing in draft 7 and another since")
            held[keyword] = self._reference(value, base)
        elif keyword == "pattern":
            held[keyword] = pattern_of(value)
        elif keyword == "format":
            found = FORMATS.get(value, {}) if isinstance(value, str) else {}
            held.update({name: inner for name, inner in found.items() if name == "format" or name not in schema})
            return [{name: inner} for name, inner in found.items() if name != "format" and name in schema]
        elif keyword == "properties":
            held[keyword] = {name: self._schema(inner, base, f"{place}/{name}") for name, inner in value.items()}
        elif keyword == "patternProperties":
            held[keyword] = {
                pattern_of(name): self._schema(inner, base, f"{place}/{name}") for name, inner in value.items()
            }
        elif keyword in MANY - {"oneOf"} and isinstance(value, list):
            inner = [self._schema(member, base, f"{place}/{index}") for index, member in enumerate(value)]
            held[keyword] = held.get(keyword, []) + inner
        elif keyword in ("items", "additionalProperties") or (
            keyword == "additionalItems" and isinstance(schema.get("items"), list)
        ):
            held[keyword] = self._schema(value, base, place)
        elif keyword == "minProperties":
            return min_properties(value, schema, held)
        elif keyword == "oneOf":
            return self._one_of(value, schema, base)
        elif keyword in REWRITTEN:
            return REWRITTEN[keyword](value, schema)
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
                raise NotHeld(f"two of its schemas can hold for the same value; {_COERCED}")
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
