"""What a JSON schema rules out: its exact opposite as a schema, and whether two of them can hold the same value.

Both answer for simple forms only. None, or False, means that it could not be decided, never a guess.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TYPES = ("null", "boolean", "number", "string", "array", "object")
_KINDS = {name: {name} for name in TYPES} | {"number": {"integer", "fraction"}, "integer": {"integer"}}
_ANNOTATIONS = words("title description default examples $comment deprecated readOnly writeOnly")
_BOUNDS = {  # keyword: the type that it holds, the keyword that rules out the same values, and the step between them
    "maxLength": ("string", "minLength", 1),
    "minLength": ("string", "maxLength", -1),
    "maxItems": ("array", "minItems", 1),
    "minItems": ("array", "maxItems", -1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
# Keywords whose values are schemas: one, a list of them, or an object of them.
ONE = words(
    "items additionalItems additionalProperties contains not if then else propertyNames"
    " unevaluatedItems unevaluatedProperties"
)
MANY = words("allOf anyOf oneOf prefixItems items")
NAMED = words("properties patternProperties $defs definitions dependentSchemas dependencies")
MAX_EXCLUDED_CHARS = 2000
MAX_DEPTH = 6


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in ONE and isinstance(value, dict):
            yield value
        elif keyword in MANY and isinstance(value, list):
            yield from value
        elif keyword in NAMED and isinstance(value, dict):
            yield from value.values()


def opposite(schema: Any, depth: int = 0) -> Any:
    """A schema for all values that are not this one's, or None."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth == MAX_DEPTH:
        return None
    options = []
    for keyword, value in schema.items():
        if keyword not in _ANNOTATIONS:
            option = _opposite_of(keyword, value, depth + 1)
            if option is None:
                return None
            options.append(option)
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


def _opposite_of(keyword: str, value: Any, depth: int) -> Any:
    if keyword == "type":
        given = _names([value] if isinstance(value, str) else value)
        others = [name for name in TYPES if name not in given]
        # Beside an integer every other number is one that is no integer, which no schema says.
        return {"type": others} if given and len(given) + len(others) == len(TYPES) else None
    if keyword in ("const", "enum"):
        return _other_than([value] if keyword == "const" else value)
    if keyword == "required" and isinstance(value, list):
        missing = [{"properties": {name: False}} for name in _names(value)]
        return {"type": "object", "anyOf": missing} if missing else False
    if keyword == "properties" and isinstance(value, dict):
        found = {name: opposite(inner, depth) for name, inner in value.items()}
        if None in found.values():
            return None
        options = [{"required": [name], "properties": {name: inner}} for name, inner in found.items()]
        return {"type": "object", "anyOf": options} if options else False
    if keyword == "not":
        return value
    if keyword in ("anyOf", "allOf") and isinstance(value, list):
        members = [opposite(member, depth) for member in value]
        return None if None in members else {"allOf" if keyword == "anyOf" else "anyOf": members}
    if keyword in _BOUNDS and isinstance(value, (int, float)) and not isinstance(value, bool):
        kind, other, step = _BOUNDS[keyword]
        return {"type": kind, other: value + step} if value + step >= 0 or step == 0 else False
    return None


def _other_than(values: Any) -> Any:
    if not isinstance(values, list):
        return None
    texts = [value for value in values if isinstance(value, str)]
    truths = {value for value in values if isinstance(value, bool)}
    if any(value is not None and not isinstance(value, (str, bool)) for value in values):
        return None
    held = {_kind(value) for value in values}
    options: list[Any] = [{"type": [name for name in TYPES if name not in held]}]
    if len(truths) == 1:
        options.append({"const": not truths.pop()})
    if texts:
        if sum(map(len, texts)) > MAX_EXCLUDED_CHARS:
            return None
        options.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    return {"anyOf": options}


def _other_texts(texts: list[str]) -> str:
    """An expression for every text but these."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    firsts = "".join(f"\\u{{{ord(letter):x}}}" for letter in by_first)
    options = [f"[^{firsts}][\\s\\S]*" if firsts else "[\\s\\S]+"]
    options += [f"\\u{{{ord(letter):x}}}{_other_texts(rest)}" for letter, rest in by_first.items()]
    return f"(?:{'|'.join(options)})" + ("" if "" in texts else "?")


class At(NamedTuple):
    """A schema, and the URI that references in it are relative to."""

    schema: Any
    base: str


class Exclusion:
    """`target` says what a reference leads to; it raises LookupError."""

    def __init__(self, target: Callable[[str, str], tuple[Any, str]]) -> None:
        self._target = target

    def between(self, one: At, other: At, depth: int = 0) -> bool:
        """Whether no value can keep to both."""
        if one.schema is False or other.schema is False:
            return True
        if depth == MAX_DEPTH:
            return False
        ours, theirs = list(self._parts(one)), list(self._parts(other))
        for parts, rest in ((ours, other), (theirs, one)):
            for part in parts:
                members = part.schema.get("anyOf", part.schema.get("oneOf"))
                members = members if isinstance(members, list) else []
                if members and all(self.between(At(member, part.base), rest, depth + 1) for member in members):
                    return True
        kinds = _kinds(ours) & _kinds(theirs)
        mine, yours = _values(ours), _values(theirs)
        if not kinds or (mine is not None and yours is not None and not mine & yours):
            return True
        return kinds == {"object"} and self._have_a_tag(ours, theirs, depth)

    def _have_a_tag(self, ours: list[At], theirs: list[At], depth: int) -> bool:
        """A property that one requires, and that the other forbids or wants another value of."""
        for parts, others in ((ours, theirs), (theirs, ours)):
            required = {name for at in parts for name in _names(at.schema.get("required"))}
            for name in required:
                if any(_forbids(at.schema, name) for at in others):
                    return True
                if any(
                    self.between(mine, yours, depth + 1)
                    for mine in _properties(parts, name)
                    for yours in _properties(others, name)
                ):
                    return True
        return False

    def _parts(self, at: At, depth: int = 0) -> Iterator[At]:
        """What all must hold: the schema, what it refers to, what stands in its allOf."""
        if not isinstance(at.schema, dict) or depth == MAX_DEPTH:
            return
        yield at
        if isinstance(reference := at.schema.get("$ref"), str):
            try:
                yield from self._parts(At(*self._target(reference, at.base)), depth + 1)
            except (LookupError, ValueError, TypeError):
                return
        members = at.schema.get("allOf", ())
        for member in members if isinstance(members, list) else ():
            yield from self._parts(At(member, at.base), depth + 1)


def _kinds(parts: list[At]) -> set[str]:
    found = set.union(*_KINDS.values())
    for at in parts:
        given = at.schema.get("type")
        if isinstance(given, (str, list)):
            names = _names([given] if isinstance(given, str) else given)
            found &= set().union(*(_KINDS.get(name, {name}) for name in names))
    values = _values(parts)
    return found if values is None else found & {_kind(json.loads(value)) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == value // 1 else "fraction"
    return {type(None): "null", str: "string", list: "array", dict: "object"}[type(value)]


def _values(parts: list[At]) -> set[str] | None:
    """The only values that they hold, or None: no enumeration."""
    found: set[str] | None = None
    for at in parts:
        for keyword in ("const", "enum"):
            if keyword in at.schema:
                given = [at.schema[keyword]] if keyword == "const" else at.schema[keyword]
                values = {_canonical(value) for value in given} if isinstance(given, list) else set()
                found = values if found is None else found & values
    return found


def _canonical(value: Any) -> str:
    """One text for values that are equal: 1 and 1.0 are."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(value), sort_keys=True)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _forbids(schema: dict[str, Any], name: str) -> bool:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return False
    if name in properties:
        return properties[name] is False
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _properties(parts: list[At], name: str) -> list[At]:
    found = []
    for at in parts:
        properties = at.schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(At(properties[name], at.base))
    return found
