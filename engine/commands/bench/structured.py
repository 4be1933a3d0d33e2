"""The part of a benchmark's requests that asks for JSON after a schema, so that it costs what constraining costs.

At the same length as the others: the built-in schema wants more records than any answer has room for.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.engine.config import ConfigError

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["river", "lake", "canal", "reservoir"]},
        "length_km": {"type": "integer", "minimum": 0, "maximum": 7000},
        "towns": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 4},
        "is_navigable": {"type": "boolean"},
    },
    "required": ["name", "kind", "length_km", "towns", "is_navigable"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": RECORD, "minItems": 100_000}


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("structured output").add_argument
    add("--structured-ratio", type=float, default=0.0, metavar="R", help="share of requests with a JSON schema, 0 to 1")
    add("--structured-schema", metavar="FILE", help="the schema (default: a list of records that is never complete)")


def response_formats(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """The fields that each of `count` requests gets on top; those that get any are spread evenly."""
    ratio = args.structured_ratio
    if not 0 <= ratio <= 1:
        raise ConfigError(f"structured_ratio: {ratio:g} given; 0 to 1 is expected")
    if ratio == 0:
        return [{}] * count
    schema = ENDLESS if args.structured_schema is None else _read(Path(args.structured_schema))
    wanted = {"type": "json_schema", "json_schema": {"name": "bench", "schema": schema}}
    return [
        {"response_format": wanted} if int((place + 1) * ratio) > int(place * ratio) else {} for place in range(count)
    ]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"structured_schema: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"structured_schema: {path} is not JSON: {error}") from None
