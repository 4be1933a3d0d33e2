"""A thread that sleeps until one of its sources has something, another thread calls it, or time has passed."""

import os
import threading
from collections.abc import Callable, Sequence

import zmq

Ready = dict[object, int]


class PollThread(threading.Thread):
    """`work` is called with the sources that are ready, also when none is; `wait_ms` says how long it may sleep."""

    def __init__(
        self, name: str, sources: Sequence[zmq.Socket[bytes]], wait_ms: Callable[[], int], work: Callable[[Ready], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._wait_ms = wait_ms
        self._work = work
        self._is_called = self._is_over = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._event, *sources):
            self._poller.register(source, zmq.POLLIN)

    def call(self) -> None:
        """From any thread. One system call for however many there are before it looks."""
        if not self._is_called:
            self._is_called = True
            os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """Returns when it has ended."""
        self._is_over = True
        os.eventfd_write(self._event, 1)
        self.join()
        os.close(self._event)

    def run(self) -> None:
        while not self._is_over:
            ready: Ready = dict(self._poller.poll(self._wait_ms()))
            if self._event in ready:
                os.eventfd_read(self._event)
                self._is_called = False  # in this order: what comes after the look below calls again
            self._work(ready)
