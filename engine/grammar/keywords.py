"""What the keywords of a JSON schema say, where llguidance says less: what they take, and what says the same in others."""

from collections.abc import Callable
from typing import Any

from penstock.engine.grammar.ecma import UNWRITABLE, translated
from penstock.engine.grammar.opposites import opposite, words

MAX_BRANCHES = 16  # of one oneOf or minProperties that is rewritten
MAX_DEPENDENCIES = 4  # each doubles the branches
TYPES = words("null boolean number integer string array object")
# Passed on as they are. A number may have any exponent: to bound it would cut 1.6e-19 off at 1.6.
PLAIN = words(
    "required minLength maxLength minItems maxItems maxProperties"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
)
COUNTS = words("minLength maxLength minItems maxItems minProperties maxProperties")
_OF_NAMES = words("enum const pattern minLength maxLength")
# With one of these, what is "unevaluated" depends on the value.
_IN_PLACE = words("$ref allOf anyOf oneOf not if dependentSchemas dependencies contains $dynamicRef $recursiveRef")
LISTS = words("enum required allOf anyOf oneOf prefixItems")
OBJECTS = words("properties patternProperties dependencies dependentSchemas dependentRequired")

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
# Without leap seconds, which are right in one minute of the day only.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"(?:[^.]{1,3}|[^.]{2}(?:[^.-][^.]|-[^.-])[^.]*)"  # without the two dashes of an encoded one
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253, "pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}


class NotHeld(Exception):
    """A keyword that no grammar holds an answer to."""


def type_of(value: Any) -> Any:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in TYPES:
            raise NotHeld(f"{str(name)[:40]!r} is no type of JSON")
    return value


def written_values(keyword: str, value: Any) -> Any:
    """Those that can be written."""
    values = value if keyword == "enum" else [value]
    found = [value for value in values if UNWRITABLE.isdisjoint(_text(value))]
    if not found:
        raise NotHeld("there is no value that could be written")
    return found if keyword == "enum" else value


def _text(value: Any) -> str:
    """All the text in it."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(key + _text(inner) for key, inner in value.items())
    return "".join(map(_text, value)) if isinstance(value, list) else ""


def pattern_of(value: str) -> str:
    try:
        return translated(value)
    except ValueError as why:
        raise NotHeld(str(why)) from None


def has_its_shape(keyword: str, value: Any) -> bool:
    if keyword in LISTS:
        return isinstance(value, list) and (keyword != "required" or all(isinstance(name, str) for name in value))
    if keyword in OBJECTS:
        return isinstance(value, dict)
    if keyword in COUNTS:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1 >= 0
    if keyword in ("$ref", "pattern"):
        return isinstance(value, str)
    return keyword not in ("not", "if", "propertyNames") or isinstance(value, (dict, bool))


def min_properties(value: int, schema: dict[str, Any], held: dict[str, Any]) -> list[Any]:
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
        raise NotHeld("nothing here counts two properties more than are required, of which one may repeat the other")
    if len(optional) > MAX_BRANCHES:
        raise NotHeld(f"it is held beside at most {MAX_BRANCHES} properties that are not required")
    if not optional:
        held["minProperties"] = int(value)
        return []
    unlisted = {"minProperties": value, "required": sorted(required), "properties": dict.fromkeys(optional, False)}
    return [{"anyOf": [{"required": [name]} for name in optional] + ([] if is_closed else [unlisted])}]


def _unique(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True and schema.get("maxItems", 2) > 1:
        raise NotHeld("what stood in an array before is not remembered")
    return []


def _contains(_value: Any, schema: dict[str, Any]) -> list[Any]:
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        return []
    raise NotHeld("which items an array holds is not counted")


def _not(value: Any, _schema: dict[str, Any]) -> list[Any]:
    found = opposite(value)
    if found is None:
        raise NotHeld("only simple schemas have an opposite here")
    return [] if found is True else [found]


def _if(value: Any, schema: dict[str, Any]) -> list[Any]:
    if "then" not in schema and "else" not in schema:
        return []
    found = opposite(value)
    if found is None:
        raise NotHeld("only simple schemas have an opposite here")
    return [{"anyOf": [{"allOf": [value, schema.get("then", True)]}, {"allOf": [found, schema.get("else", True)]}]}]


def _property_names(value: Any, _schema: dict[str, Any]) -> list[Any]:
    if value is False:
        return [{"maxProperties": 0}]
    given = {} if value is True else {name: inner for name, inner in value.items() if name in _OF_NAMES}
    ignored = {"type", "title", "description", "$comment", "default", "examples"}
    if value is not True and (set(value) - set(given) - ignored or value.get("type", "string") != "string"):
        raise NotHeld("only an enumeration, a pattern or a length of names is held")
    if not all(has_its_shape(keyword, inner) for keyword, inner in given.items()):
        raise NotHeld("one of its keywords does not take what it is given")
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
        raise NotHeld(f"at most {MAX_DEPENDENCIES} dependencies are held")
    return [
        {"anyOf": [{"properties": {name: False}}, {"required": inner} if isinstance(inner, list) else inner]}
        for name, inner in value.items()
    ]


def _unevaluated_properties(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True or "additionalProperties" in schema:
        return []
    if _IN_PLACE & schema.keys():
        raise NotHeld("which properties have been looked at is not remembered")
    known = {name: dict.fromkeys(schema[name], True) for name in ("properties", "patternProperties") if name in schema}
    return [{**known, "additionalProperties": value}]


def _unevaluated_items(value: Any, schema: dict[str, Any]) -> list[Any]:
    if value is True or ("items" in schema and not isinstance(schema["items"], list)):
        return []
    if _IN_PLACE & schema.keys() or "items" in schema:
        raise NotHeld("which items have been looked at is not remembered")
    return [{"prefixItems": [True] * len(schema.get("prefixItems", ())), "items": value}]


def _never(why: str) -> Callable[[Any, dict[str, Any]], list[Any]]:
    def refuse(_value: Any, _schema: dict[str, Any]) -> list[Any]:
        raise NotHeld(why)

    return refuse


REWRITTEN: dict[str, Callable[[Any, dict[str, Any]], list[Any]]] = {
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
