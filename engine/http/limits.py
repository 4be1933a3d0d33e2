"""What a connection may cost before a request has proved itself: bytes, seconds and how many at once.

The defaults serve a 128k context; the flags of `penstock serve` and `penstock route` change them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.engine.options import Count, Flag, Seconds, size_bytes

KEEP_ALIVE_S = 75.0  # an idle connection; longer than the 60 s after which load balancers drop theirs
LINGER_S = 1.0  # how long a refused client may go on sending, so that it reads the refusal before a reset
MAX_REFUSALS = 64  # connections beyond the limit that get a reason; what comes on top is dropped


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024  # request line and headers together
    max_body_bytes: Annotated[int, Meta(ge=1024), Flag("limit of a body", "SIZE", read=size_bytes)] = (
        4 * 1024 * 1024  # the worst JSON of this size holds up the event loop for 50 ms
    )
    header_timeout_s: Seconds = 10.0  # from the first byte (or the connection) to the end of the headers
    body_timeout_s: Seconds = 60.0  # from the end of the headers to the end of the body
    write_timeout_s: Seconds = 60.0  # a client that lets its full buffer stand this long is cut off
    max_connections: Annotated[Count, Flag("default: %(default)s", "N")] = 4096
