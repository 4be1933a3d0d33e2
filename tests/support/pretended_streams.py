"""Streams, events and graphs of the pretended GPU: clocks that wait for each other, and operations that are repeated.

`gpu` is the PretendedGpu that they are of, whose module imports this one.
"""

from typing import Any

import numpy as np
import torch

from tests.support.pretended_memory import Pool
from tests.support.pretended_ops import Op
from tests.support.races import Clock


class Stream:
    def __init__(self, gpu: Any, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.actor = gpu.races.actor(name)
        gpu.streams.append(self.actor)
        self.pool = Pool(gpu, name)

    def launch(self) -> None:
        """Order what is launched behind all that the host has done."""
        self.gpu.races.wait(self.actor, self.gpu.races.now(self.gpu.host))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        self.launch()
        self.gpu.races.wait(self.actor, event.moment)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.races.wait(self.gpu.host, self.gpu.races.now(self.actor))


class Event:
    def __init__(self, gpu: Any, enable_timing: bool = False) -> None:
        self.gpu, self.has_timing = gpu, enable_timing
        self.moment: Clock = np.zeros(1, np.int64)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.stream
        stream.launch()
        self.moment = self.gpu.races.now(stream.actor)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.races.wait(self.gpu.host, self.moment)

    def elapsed_time(self, other: "Event") -> float:
        assert self.has_timing and other.has_timing
        return 1.0


class Graph:
    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.ops: list[Op] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._gpu.stream.launch()
        with torch.inference_mode():
            for op in self.ops:
                self._gpu.note(op, self._gpu.stream.actor)
                op.repeat()
