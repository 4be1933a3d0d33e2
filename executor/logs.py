"""Logging of a process and of its children: the levels, and the form of a line."""

import logging
import os
import sys
from typing import Any

LOG_VARIABLE = "PENSTOCK_LOG_LEVEL"  # child processes inherit it
ROOMS = ("engine", "executor", "cache", "router")  # the packages that log
LEVELS = ("debug", "info", "warning", "error", "critical")


def log_levels(text: str) -> dict[str, str]:
    """Parse `info,router=debug` into {"": "info", "router": "debug"}, where "" is all folders; ValueError if invalid."""
    levels_by_room: dict[str, str] = {}
    for part in text.split(","):
        room, mark, level = part.strip().rpartition("=")
        if mark and room not in ROOMS:
            raise ValueError(f"log_level: {room[:40]!r} is not a folder of the code; known are {', '.join(ROOMS)}")
        if level.lower() not in LEVELS:
            raise ValueError(f"log_level: {level[:40]!r} is not a level; levels are {', '.join(LEVELS)}")
        if room in levels_by_room:
            raise ValueError(f"log_level: given twice for {room or 'all'}")
        levels_by_room[room] = level.lower()
    return levels_by_room


class LineFormatter(logging.Formatter):
    """Formats a record as one line, in which control characters are escaped: messages quote what clients wrote, and a
    line feed there would begin a line of the client's own. The lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def log_to_stderr(levels: str | None = None) -> None:
    """Write this package's log to standard error. Libraries log warnings only, because their lines may contain prompts.

    `levels` also applies to child processes started from now on."""
    if levels is not None:
        os.environ[LOG_VARIABLE] = levels
    found = log_levels(os.environ.get(LOG_VARIABLE, "info"))
    overall = getattr(logging, found.pop("", "info").upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=max(overall, logging.WARNING), handlers=[handler])
    logging.getLogger("penstock").setLevel(overall)
    for room, level in found.items():
        logging.getLogger(f"penstock.{room}").setLevel(level.upper())
