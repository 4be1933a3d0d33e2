"""The options of `penstock prove`, parsed with argparse alone, so that a proof needs nothing of the engine."""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .http_client import key_header

MAX_SECONDS = 1e9
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class ProveError(ValueError):
    """Raised when an option cannot be used as given, or no server answers at the URL; the message names the option."""


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """How much is asked, how fast and for how long, and which servers are started."""

    seed: int = 0
    requests: int = 300
    rate: float = 20.0  # requests per second
    concurrency: int = 16
    duration: float = 300.0  # seconds
    max_bytes: int = 64 * 2**20
    timeout: float = 120.0  # seconds
    exact: bool = False
    scripts: str | None = None
    cases: tuple[str, ...] = ()
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
        for name, kind in (("json", "file"), ("junit", "file"), ("badge", "file"), ("scripts", "folder")):
            path = Path(getattr(self, name) or "")
            place = path if kind == "folder" and path.exists() else path.parent  # what is written into
            if getattr(self, name) and ((kind == "file" and path.is_dir()) or not os.access(f"{place}/", os.W_OK)):
                raise ProveError(f"{name}: {path} given; a {kind} in a folder that can be written is expected")
        for option, value in (("case", self.cases), ("scripts", self.scripts)):
            if value and self.faults:
                raise ProveError(f"{option}: given; with --fault there are neither cases nor scripts")
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


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 64MiB, 500MB or 1048576")
    return int(found[1]) * _UNITS[found[2]]


# Options with a number: name, type, metavar and help.
NUMBERS: tuple[tuple[str, Callable[[str], float], str, str], ...] = (
    ("seed", int, "N", "seed of questions, schedule and faults: the same requests each time (default: %(default)s)"),
    ("requests", int, "N", "requests under load, in addition to those that are asked alone (default: %(default)s)"),
    ("rate", float, "R", "requests per second on average, in bursts (default: %(default)g)"),
    ("concurrency", int, "N", "most requests in flight (default: %(default)s)"),
    ("duration", float, "S", "most seconds for the run; requests that do not fit are left out (default: %(default)g)"),
    ("max-bytes", _size_bytes, "SIZE", "most bytes to send and receive (default: 64MiB)"),
    ("timeout", float, "S", "an answer without a byte for this many seconds counts as hung (default: %(default)g)"),
)


# Options with a text or without a value: name, further arguments of argparse, and help.
FLAG, MANY = {"action": "store_true"}, {"action": "append", "default": []}
NAMES, MORE_WORLDS = {**MANY, "metavar": "NAME"}, "small-steps, drafts, ranks, tiers, router, split"
TEXTS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("exact", FLAG, "require the same bits: allow no tie and no difference in a log-probability"),
    ("case", {**NAMES, "dest": "cases"}, "run only this case, without load (all: every case)"),
    ("list", FLAG, "list the cases: their requests, and the meaning of a finding"),
    ("self-test", FLAG, "find the planted defects of the reference server in penstock-prove"),
    ("scripts", {"metavar": "DIR"}, "write a curl script and a bug report for the failures here (default: none)"),
    ("json", {"metavar": "FILE"}, "write the result as JSON (default: only its line on standard output)"),
    ("junit", {"metavar": "FILE"}, "write the result as JUnit XML (default: none)"),
    ("badge", {"metavar": "FILE"}, "write an SVG badge with the number of findings (default: none)"),
    ("header", {**MANY, "metavar": "KEY=VALUE"}, "header of every request, besides PENSTOCK_API_KEY or OPENAI_API_KEY"),
)
OWN_SERVERS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("world", {**NAMES, "dest": "worlds"}, f"servers to start: uniproc (default), {MORE_WORLDS} or all"),
    ("fault", {**NAMES, "dest": "faults"}, "start a server and inject this fault under load; all: every fault"),
    ("model", {}, "hub name, folder or .gguf file (default: the default model)"),
    ("serve-options", {"default": "", "metavar": "WORDS"}, "further options of penstock serve, in one argument"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the URL and the options to the parser of the command."""
    defaults = ProveOptions()
    parser.add_argument("url", nargs="?", help="a server or router with OpenAI's /v1/completions (default: start one)")
    for name, kind, metavar, text in NUMBERS:
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    own = parser.add_argument_group("servers of its own")
    for group, table in ((parser, TEXTS), (own, OWN_SERVERS)):
        for name, more, text in table:
            group.add_argument(f"--{name}", help=text, **more)


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
