"""A thread that waits for sockets, for a wake-up by another thread, or for a timeout."""

import os
import threading
from collections.abc import Callable, Sequence

import zmq

Ready = dict[object, int]


class PollThread(threading.Thread):
    """A polling loop: calls `work` with the ready sources, possibly none; waits at most `wait_ms()` each time."""

    def __init__(
        self, name: str, sources: Sequence[zmq.Socket[bytes]], wait_ms: Callable[[], int], work: Callable[[Ready], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._wait_ms = wait_ms
        self._work = work
        self._is_woken = self._is_over = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._event, *sources):
            self._poller.register(source, zmq.POLLIN)

    def wake(self) -> None:
        """Wake the thread, from any thread. Calls before it has woken up share one system call."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._is_over = True
        os.eventfd_write(self._event, 1)
        self.join()
        os.close(self._event)

    def run(self) -> None:
        while not self._is_over:
            ready: Ready = dict(self._poller.poll(self._wait_ms()))
            if self._event in ready:
                os.eventfd_read(self._event)
                self._is_woken = False  # before `work`: a call during `work` has to wake the thread again
            self._work(ready)
