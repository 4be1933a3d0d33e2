"""Streams between two chunks of which nothing need be known: they pass in C (csrc/relay.c), all that have something in one
call, until there is something to be looked at. The loop does not read what passes here; it still hears of a client that
leaves. The exchange decides what may pass; a connection to a replica closes its lane before it does anything else.
"""

import asyncio
import os
import select
from typing import TYPE_CHECKING

from penstock._csrc import ffi, lib

if TYPE_CHECKING:
    from penstock.router.http.upstream import Upstream

ROOM_BYTES = 64 * 1024  # read at once


class Lane:
    """One stream on its way, once; it ends when its bytes have to be looked at."""

    __slots__ = ("_relay", "c", "client", "is_open", "upstream")

    def __init__(self, relay: "Relay", upstream: "Upstream", client: asyncio.Transport) -> None:
        self._relay, self.upstream, self.client = relay, upstream, client
        self.c = ffi.new("struct penstock_lane *")
        ends = [each.get_extra_info("socket").fileno() for each in (upstream.transport, client)]
        self.is_open = bool(lib.penstock_relay_open(relay.c, self.c, *ends))
        if self.is_open:
            relay.lanes[self.c] = self
            upstream.transport.pause_reading()

    def take_count(self) -> int:
        """Events that have passed since it was last asked."""
        count, self.c.num_events = int(self.c.num_events), 0
        return count

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            del self._relay.lanes[self.c]
            lib.penstock_relay_close(self._relay.c, self.c)
            if not self.upstream.transport.is_closing():
                self.upstream.transport.resume_reading()


class Relay:
    """All lanes of one event loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        data = ffi.new("uint8_t[]", ROOM_BYTES)
        self._data = ffi.buffer(data)  # keeps it
        self.c = ffi.new("struct penstock_relay *", {"epoll": self._epoll.fileno(), "data": data, "room": ROOM_BYTES})
        self.lanes: dict[object, Lane] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._run)

    def take(self, upstream: "Upstream", client: asyncio.Transport, data: bytes) -> Lane | None:
        """Write `data`, and from now on what comes after it. None: nothing was done, for it is not between two chunks, or the
        client has not read what it has."""
        if not upstream.is_between or client.get_write_buffer_size() or client.is_closing():
            return None
        lane = upstream.lane = Lane(self, upstream, client)
        if not lane.is_open:
            return None
        try:
            num_sent = os.write(lane.c.to, data)
        except OSError:  # full; or broken, of which the loop hears
            num_sent = 0
        if num_sent < len(data):
            lane.close()
            client.write(data[num_sent:])
        return lane

    def close(self) -> None:
        for lane in list(self.lanes.values()):
            lane.close()
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _run(self) -> None:
        """One lane that ends a call: those behind it are ready still, and the loop calls again."""
        lane = self.lanes.get(lib.penstock_relay_run(self.c))
        if lane is not None:
            unsent, rest = self._data[self.c.sent : self.c.passed], self._data[self.c.passed : self.c.size]
            lane.close()
            if unsent:
                lane.client.write(unsent)
            if rest:
                lane.upstream.data_received(rest)
