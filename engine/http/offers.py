"""Offers of another protocol in a request's head, before a parser sees them."""

import re

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """Rename a header that offers another protocol. Java's client sends one with every request, and a parser that sees it
    takes what follows for that protocol: the body would be lost, or be read as the next request."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:  # as nearly always: nothing is copied
        return data
    return _UPGRADE.sub(b"\r\nx-penstock-upgrade:", data[:end]) + data[end:]
