"""The options of `penstock prove`, parsed with argparse alone, so that a proof needs nothing of the engine."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .http_client import key_header
from .tables import load_table

MAX_SECONDS = 1e9
FILES = ("log", "json", "junit", "badge")
OWN_SERVERS = ("worlds", "faults", "model", "serve_options")  # options of servers that are started here
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class ProveError(ValueError):
    """Raised when an option cannot be used as given, or no server answers at the URL; the message names the option."""


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 64MiB, 500MB or 1048576")
    return int(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """How much is asked, how fast and for how long, and which servers are started."""

    seed: int = 0
    requests: int = 300
    rate: float = 20.0
    concurrency: int = 16
    duration: float = 300.0
    max_bytes: int = 64 * 2**20
    timeout: float = 120.0
    exact: bool = False
    cases: tuple[str, ...] = ()
    lists_cases: bool = False
    self_test: bool = False
    restart: str | None = None
    stop: str | None = None
    start: str | None = None
    expect_restored: bool = False
    against: str | None = None
    scripts: str | None = None
    log: str | None = None
    json: str | None = None
    junit: str | None = None
    badge: str | None = None
    header: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    model: str | None = None
    serve_options: str = ""

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "max_bytes"):
            if getattr(self, name) < 1:
                raise ProveError(f"{name}: {getattr(self, name)} given; at least 1 is expected")
        for name, kind in (*((name, "file") for name in FILES), ("scripts", "folder")):
            path = Path(getattr(self, name) or "")
            place = path if kind == "folder" and path.exists() else path.parent  # what is written into
            if getattr(self, name) and ((kind == "file" and path.is_dir()) or not os.access(f"{place}/", os.W_OK)):
                raise ProveError(f"{name}: {path} given; a {kind} in a folder that can be written is expected")
        for option, value in (("case", self.cases), ("scripts", self.scripts), ("against", self.against)):
            if value and self.faults:
                raise ProveError(f"{option}: given; with --fault there are neither cases, scripts nor a second server")
        if (self.stop is None) != (self.start is None) or (self.restart and self.stop):
            raise ProveError("restart: --restart, or --stop and --start together, is expected")
        if self.expect_restored and not (self.restart or self.start):
            raise ProveError("expect-restored: given; it requires --restart, or --stop and --start")
        for name in ("rate", "duration", "timeout"):
            value = getattr(self, name)
            if not 0 < value <= MAX_SECONDS:  # a NaN, too
                raise ProveError(f"{name}: {value:g} given; above 0 and at most {MAX_SECONDS:g} is expected")

    @classmethod
    def of(cls, args: argparse.Namespace) -> "ProveOptions":
        """Build the options from a parsed command line."""
        given: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(cls)}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the URL and the options to the parser of the command."""
    parser.add_argument("url", nargs="?", help="a server or router with OpenAI's /v1/completions (default: start one)")
    own = parser.add_argument_group("servers of its own")
    for name, row in load_table("options").items():
        default, group = getattr(ProveOptions, name), own if name in OWN_SERVERS else parser
        settings: dict[str, Any] = {"dest": name, "default": default, "help": row["help"]}
        if isinstance(default, bool):
            settings["action"] = "store_true"
        elif default == ():
            # argparse appends to the default.
            settings |= {"action": "append", "default": [], "metavar": row["metavar"]}
        else:
            settings["metavar"] = row.get("metavar")
        if isinstance(default, int | float) and not isinstance(default, bool):
            settings["type"] = _size_bytes if name == "max_bytes" else type(default)
            settings["help"] += "" if "default" in row["help"] else f" (default: {default:g})"
        group.add_argument(row.get("flag", f"--{name.replace('_', '-')}"), **settings)


def chosen(field: str, names: Sequence[str], choices: Mapping[str, Any]) -> list[str]:
    """Return the names that an option gives; "all" is every choice. Raise ProveError if one is not a choice."""
    for name in names:
        if name not in choices and name != "all":
            raise ProveError(f"{field}: {name!r} given; {', '.join(choices)} or all is expected")
    return list(choices) if "all" in names else list(names)


def request_headers(options: ProveOptions) -> dict[str, str]:
    """Return the headers of every request: those given, and the API key from the environment."""
    headers = key_header()
    for item in options.header:
        name, separator, value = item.partition("=")
        if not separator or not name.strip():
            raise ProveError(f"header: {item!r} given; KEY=VALUE is expected")
        headers[name.strip()] = value.strip()
    return headers
