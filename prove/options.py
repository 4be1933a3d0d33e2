"""The options of `penstock prove`, parsed with argparse alone, so that a proof needs nothing of the engine."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .http_client import key_header

MAX_SECONDS = 1e9
MORE_WORLDS = "small-steps, drafts, ranks, tiers, router, split"
OWN_SERVERS = ("worlds", "faults", "model", "serve_options")  # options of servers that are started here
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class ProveError(ValueError):
    """Raised when an option cannot be used as given, or no server answers at the URL; the message names the option."""


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 64MiB, 500MB or 1048576")
    return int(found[1]) * _UNITS[found[2]]


def _option(text: str, default: Any = None, metavar: str | None = None, flag: str = "", **settings: Any) -> Any:
    """Declare an option. The default determines how argparse reads it, and stands in the help if it is a number; `flag`
    replaces the flag that is derived from the field, and the other settings are those of argparse."""
    settings |= {"action": "store_true"} if isinstance(default, bool) else {"metavar": metavar}
    if isinstance(default, tuple):
        settings["action"] = "append"
    elif isinstance(default, int | float) and not isinstance(default, bool):
        settings.setdefault("type", type(default))
        text = text if "default" in text else f"{text} (default: {default:g})"
    return field(default=default, metadata={"flag": flag, "settings": {"help": text, **settings}})


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """How much is asked, how fast and for how long, and which servers are started."""

    seed: int = _option("seed of questions, schedule and faults: the same requests each time", 0, "N")
    requests: int = _option("requests under load, in addition to those that are asked alone", 300, "N")
    rate: float = _option("requests per second on average, in bursts", 20.0, "R")
    concurrency: int = _option("most requests in flight", 16, "N")
    duration: float = _option("most seconds for the run; requests that do not fit are left out", 300.0, "S")
    max_bytes: int = _option("most bytes to send and receive (default: 64MiB)", 64 * 2**20, "SIZE", type=_size_bytes)
    timeout: float = _option("an answer without a byte for this many seconds counts as hung", 120.0, "S")
    exact: bool = _option("require the same bits: allow no tie and no difference in a log-probability", False)
    cases: tuple[str, ...] = _option("run only this case, without load (all: every case)", (), "NAME", "--case")
    lists_cases: bool = _option("list the cases: their requests, and the meaning of a finding", False, flag="--list")
    self_test: bool = _option("find the planted defects of the reference server in penstock-prove", False)
    scripts: str | None = _option(
        "write a curl script and a bug report for the failures here (default: none)", None, "DIR"
    )
    json: str | None = _option("write the result as JSON (default: only its line on standard output)", None, "FILE")
    junit: str | None = _option("write the result as JUnit XML (default: none)", None, "FILE")
    badge: str | None = _option("write an SVG badge with the number of findings (default: none)", None, "FILE")
    header: tuple[str, ...] = _option(
        "header of every request, besides PENSTOCK_API_KEY or OPENAI_API_KEY", (), "KEY=VALUE"
    )
    worlds: tuple[str, ...] = _option(
        f"servers to start: uniproc (default), {MORE_WORLDS} or all", (), "NAME", "--world"
    )
    faults: tuple[str, ...] = _option(
        "start a server and inject this fault under load; all: every fault", (), "NAME", "--fault"
    )
    model: str | None = _option("hub name, folder or .gguf file (default: the default model)")
    serve_options: str = _option("further options of penstock serve, in one argument", "", "WORDS")

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the URL and the options to the parser of the command."""
    parser.add_argument("url", nargs="?", help="a server or router with OpenAI's /v1/completions (default: start one)")
    own = parser.add_argument_group("servers of its own")
    for option in fields(ProveOptions):
        flag = option.metadata["flag"] or f"--{option.name.replace('_', '-')}"
        default = [] if option.default == () else option.default  # argparse appends to the default
        group = own if option.name in OWN_SERVERS else parser
        group.add_argument(flag, dest=option.name, default=default, **option.metadata["settings"])


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
