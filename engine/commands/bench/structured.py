"""The part of a benchmark's requests that asks for JSON after a schema, so that it costs what constraining costs.

At the same length as the others: the built-in schema wants more records than any answer has room for.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.config import ConfigError, chosen
from penstock.engine.options import Share, flag

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


@dataclass(frozen=True, kw_only=True)
class StructuredOptions:
    structured_ratio: Share = flag(
        "share of requests with a JSON schema, 0 to 1", "R", default=0.0, opens="structured output"
    )
    structured_schema: str | None = flag("the schema (default: a list of records that is never complete)", "FILE")


def response_formats(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """The fields that each of `count` requests gets on top; those that get any are spread evenly."""
    ratio = chosen(args, StructuredOptions).structured_ratio
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
