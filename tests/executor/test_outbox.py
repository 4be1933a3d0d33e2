"""Results on their way to the host. Streams and events are made up: what is tested is who waits for whom."""

import contextlib

import pytest
import torch

from penstock.executor.outbox import Outbox


class Stream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def wait_stream(self, other: "Stream") -> None:
        self._said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self._said.append(f"{self.name} waits for copy {event.number}")


class Event:
    def __init__(self, said: list[str]) -> None:
        self._said, self.number = said, 0

    def record(self) -> None:
        self.number = 1 + sum("recorded" in line for line in self._said)
        self._said.append(f"copy {self.number} recorded")

    def synchronize(self) -> None:
        self._said.append(f"the host waits for copy {self.number}")


def test_on_a_cpu_everything_has_arrived() -> None:
    tokens = torch.tensor([1, 2])
    outbox = Outbox(torch.device("cpu"))
    (arrived,) = outbox.send([tokens]).wait()
    assert arrived is tokens
    outbox.hold()


def test_the_host_waits_for_one_copy_and_the_device_only_where_it_would_overwrite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("outbox", said))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computing", said))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    outbox = Outbox(torch.device("cuda", 0))
    outbox.hold()  # nothing was sent
    first = outbox.send([torch.tensor([1])])
    second = outbox.send([torch.tensor([2])])
    outbox.hold()
    assert first.wait()[0].tolist() == [1] and second.wait()[0].tolist() == [2]
    assert said == [
        "outbox waits for computing",
        "copy 1 recorded",
        "outbox waits for computing",
        "copy 2 recorded",
        "computing waits for copy 2",
        "the host waits for copy 1",
        "the host waits for copy 2",
    ]
