"""What the supervisor works with: the seam to the cluster, what it remembers of a replica, what it shows of itself."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from penstock.router.deploy.child import Sight
from penstock.router.deploy.file import Restart, Template

Phase = Literal["rolling", "rolling back", "serving", "stopping", "down"]

MAX_PAUSE_S = 30.0


class ProcessHandle(Protocol):
    """One process somewhere in the cluster. Nothing here waits for it."""

    def look(self) -> Sight: ...
    def drain(self) -> None: ...
    def kill(self) -> None: ...


class Gate(Protocol):
    """A router's word on who is behind it: state by URL, or None, and nothing changes, where it does not answer."""

    def states(self) -> dict[str, str] | None: ...
    def add(self, url: str) -> object: ...
    def remove(self, url: str) -> object: ...


class Cluster(Protocol):
    def replica(self, name: str, template: Template, drain_s: float, env: Mapping[str, str]) -> ProcessHandle: ...
    def router(self, words: Sequence[str], cpus: float, env: Mapping[str, str]) -> ProcessHandle: ...
    def gate(self, url: str, admin_key: str) -> Gate: ...
    def room(self, template: Template) -> str: ...  # what a replica needs and what is free, in words


class Starts:
    """How often something has died in a row, and when it may be started again."""

    def __init__(self) -> None:
        self.failures = 0
        self.not_before_s = 0.0
        self.reason = ""

    def died(self, reason: str, ready_since_s: float | None, now_s: float, how: Restart) -> None:
        if ready_since_s is not None and now_s - ready_since_s >= how.stable_s:
            self.failures = 0
        self.failures += 1
        self.reason = reason
        self.not_before_s = now_s + min(how.pause_s * 2 ** min(self.failures - 1, 16), MAX_PAUSE_S)

    def may_start(self, now_s: float, how: Restart) -> bool:
        return now_s >= self.not_before_s and not self.is_over(how)

    def is_over(self, how: Restart) -> bool:
        return self.failures > how.limit

    def line(self, name: str, state: str, sight: Sight) -> "Line":
        return Line(name, state, sight, self.failures, self.reason)


class SlotReplica:
    """One process of a slot, from its start to its end."""

    def __init__(self, slot: int, version: int, template: Template, handle: ProcessHandle, now_s: float) -> None:
        self.name = f"replica {slot} of version {version}"
        self.slot, self.version, self.template, self.handle = slot, version, template, handle
        self.state: Literal["starting", "ready", "leaving", "stopping"] = "starting"
        self.since_s = now_s  # of the state
        self.ready_since_s: float | None = None
        self.lost_since_s: float | None = None
        self.sight = Sight()
        self.has_waited = False

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "ready")

    def become(self, state: Literal["ready", "leaving", "stopping"], now_s: float) -> None:
        self.state, self.since_s = state, now_s


class Line(msgspec.Struct, frozen=True):
    """A replica or the router, in `--status`."""

    name: str
    state: str
    sight: Sight
    failures: int  # in a row
    reason: str  # of the last of them


class View(msgspec.Struct, frozen=True):
    """What `--status` shows."""

    name: str
    phase: Phase
    version: int
    count: int
    failure: str | None  # why the last roll-out failed, or the deployment ended
    lines: list[Line]  # the router, the replicas, the slots that are left alone
    is_whole: bool
