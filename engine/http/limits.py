"""Limits of connections: sizes, timeouts and numbers.

The defaults serve a 128k context; the flags of `penstock serve` and `penstock route` change them.
"""

import resource
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.engine.options import Count, Seconds, flag, size_bytes

KEEP_ALIVE_S = 75.0  # for idle connections; longer than the 60 s after which load balancers close theirs
LINGER_S = 1.0  # how long a refused client's input is still read, so that it gets the refusal before a reset
MAX_REFUSALS = 64  # connections beyond the limit that get an error; further ones are dropped


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024  # request line and headers together; trailers again
    max_body_bytes: Annotated[int, Meta(ge=1024)] = flag(4 * 1024 * 1024, read=size_bytes)
    header_timeout_s: Seconds = 10.0  # from the first byte (or the connection) to the end of the headers
    body_timeout_s: Seconds = 60.0  # from the end of the headers to the end of the body
    write_timeout_s: Seconds = 60.0  # a client that leaves its buffer full for so long is disconnected
    max_connections: Count = 4096


def allow_open_files(num_files: int) -> int:
    """Raise the soft limit of open files to `num_files`, as far as the hard limit allows. Return how many may be open now,
    at most `num_files`.

    Each connection needs a file descriptor, and the usual soft limit of 1,024 is lower than what a server or a benchmark
    may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    return reachable
