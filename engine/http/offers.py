"""Removal of protocol upgrade offers from a request's head before it is parsed."""

import re

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """Rename the Upgrade header, which Java's client sends with every request. After it, a parser treats the following
    bytes as the other protocol: the body would be lost or parsed as the next request."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:  # the common case: nothing is copied
        return data
    return _UPGRADE.sub(b"\r\nx-penstock-upgrade:", data[:end]) + data[end:]
