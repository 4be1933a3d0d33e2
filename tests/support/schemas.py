"""Random JSON schemas, from a seed: what real ones are made of, and but for the decimals of numbers every answer is finite."""

import random
from typing import Any

NAMES = [
    *("id", "name", "city", "tags", "price", "score", "is_open", "notes", "parent", "created", "address", "lines"),
    *("unit", "status", "größe"),
]
WORDS = ["red", "green", "blue", "a b", "", 'say "hi"', "é", "C:\\", "<|im_end|>", "0", "null"]
PATTERNS = ["^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-f0-9]{8}$", "^[^\\s]{1,6}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]  # email and uri have no longest


def random_schema(seed: int) -> dict[str, Any]:
    """An object at the top in most cases, as callers ask for them."""
    rng = random.Random(seed)
    definitions: dict[str, Any] = {"point": _object(rng, 1), "code": _string(rng)}
    schema = _object(rng, 3) if rng.random() < 0.8 else _any(rng, 3)
    return {"$defs": definitions, **schema}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = [_string, _integer, _number, _enum, _const, _boolean, _nullable]
    nested = [_array, _object, _any_of, _reference]
    place = rng.randrange(len(simple) + (len(nested) if depth > 0 else 0))
    return simple[place](rng) if place < len(simple) else nested[place - len(simple)](rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _any(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(['point', 'code'])}"}


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 20)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 100, 10**6])}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100) / 4
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 10, 1000])}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, 2]], rng.randint(1, 5))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 17, False, None, {"a": [1]}])}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _nullable(rng: random.Random) -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": rng.randint(1, 10)}
