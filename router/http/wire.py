"""The HTTP/1.1 that the router writes: heads of answers and of requests to replicas, and which headers pass.

Hop-by-hop headers (and what a Connection header names) end here in both directions, and so do the router's own
`x-penstock-` names when they come from a client.
"""

from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PRIVATE = b"x-penstock-"

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Of a request, what the router writes itself.
REWRITTEN = HOP_BY_HOP | {b"host", b"content-length", b"content-type", b"expect", b"authorization"}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode()) for status in map(int, HTTPStatus)
}


def answer_head(status: int, lines: bytes, keep_alive: bool) -> bytes:
    """`lines`: the headers, written."""
    status_line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    return status_line + lines + (b"\r\n" if keep_alive else b"connection: close\r\n\r\n")


def written(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def passing(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that may pass, without `dropped` and what a Connection header names."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(word.strip().lower() for word in value.split(b","))
    if named - {b"keep-alive", b"close"}:
        dropped = dropped | named
    return [(name, value) for name, value in headers if name not in dropped and not name.startswith(PRIVATE)]


def request_head(target: bytes, host: bytes, lines: bytes, content_length: int) -> bytes:
    """A POST to a replica. `lines` are its headers, written and clean: they came through `passing`."""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (target, host, lines, content_length)
