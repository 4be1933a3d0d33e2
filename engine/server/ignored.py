"""Reports ignored parts of requests: once per name in the log, and in the header `X-Penstock-Ignored` of each response.
server/requests.py and the agents' APIs collect the names in `Call.ignored`."""

import logging
import re
from collections.abc import Sequence

from penstock.engine.http.errors import clip

HEADER = b"x-penstock-ignored"
MAX_HEADER_CHARS = 1024
MAX_LOGGED = 256  # bounded, because clients choose the names

log = logging.getLogger("penstock.engine")

_UNSAFE = re.compile(r"[^A-Za-z0-9_.:\[\]-]")


class IgnoredNames:
    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, names: Sequence[str]) -> tuple[bytes, bytes]:
        """Log the names that have not been logged yet, and return the header with all names."""
        shown = [clip(_UNSAFE.sub("?", name)).replace("…", "...") for name in names]
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("requests have %s, which is not served here and is ignored", name)
        return HEADER, clip(", ".join(shown), MAX_HEADER_CHARS).replace("…", "...").encode()
