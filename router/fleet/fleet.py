"""All replicas, grouped by the model they serve, and their availability.

The placement of a group chooses a replica. The fleet decides which replicas are available, and limits the effect of
failures: at most a share of a group is excluded for failing while alive. Dead replicas are always excluded. Prefill
replicas form a group of their own beside the group that answers clients.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.engine.http.errors import HttpError, clip
from penstock.router.backend import Backend
from penstock.router.background import Tasks
from penstock.router.config import RouterConfig
from penstock.router.fleet.replica import Outcome, Replica, State
from penstock.router.placement.load import PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo

log = logging.getLogger("penstock.router")

RESERVE = 10  # retries that are allowed before the first request
EXCLUDED_FOR_FAILURES = frozenset[State]({"suspect", "ejected", "trial"})


class ReplicaGroup:
    """The replicas of one model, and the placement that knows their caches."""

    def __init__(self, root: str, placement: Placement) -> None:
        self.root = root
        self.placement = placement
        self.replicas: dict[str, Replica] = {}
        self.adapters: dict[str, str] = {}  # adapter name → block key; if replicas differ, one of their values
        self.is_mixed = False  # whether the replicas serve different model names
        self.prefills: ReplicaGroup | None = None  # the prefill replicas for this model, if any

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for replica in self.replicas.values() for name in replica.models))

    def excluded_for(self, name: str | None, tried: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return the replicas that a request cannot use: those that it has tried, or that do not serve this model name."""
        if name is None or not self.is_mixed:
            return tried
        return tried.union(url for url, replica in self.replicas.items() if name not in replica.models)


class Fleet:
    """All replicas and their groups. `on_down` moves the requests that wait at a replica which has gone down."""

    def __init__(self, config: RouterConfig, on_down: Callable[[Replica], None]) -> None:
        self.config = config
        self.replicas: dict[str, Replica] = {}
        self.detached: set[Replica] = set()  # removed from service, with requests in flight
        self.groups: dict[str, ReplicaGroup] = {}  # root → the group that answers clients
        self.prefills: dict[str, ReplicaGroup] = {}  # root → the group that computes prompts for it
        self._by_name: dict[str, ReplicaGroup] = {}
        self.budget = RetryBudget(config.timeouts.retry_share)
        self.num_in_flight = 0
        self.tasks = Tasks()  # of requests, probes, event feeds and discovery
        self._on_down = on_down

    def add(self, backend: Backend) -> Replica:
        key = self.config.backend_api_key
        key_line = b"" if key is None else f"authorization: Bearer {key}\r\n".encode()
        replica = Replica(backend, self.config.timeouts.connect_s, key_line)
        self.replicas[backend.url] = replica
        return replica

    def assign_group(self, replica: Replica, root: str, models: tuple[str, ...], info: ReplicaInfo) -> None:
        """Put a replica into the group of its model when its models become known or have changed after a restart.

        Raise ValueError if the information is invalid; the replica then belongs to no group."""
        if self.replicas.get(replica.url) is not replica:
            return  # removed while its models were requested: another replica may have its address by now
        self._leave_group(replica)
        groups = self._groups_beside(replica)
        group = groups.get(root) or ReplicaGroup(root, Placement(PolicyConfig(self.config.policy)))
        group.placement.add_replica(replica.url, info)  # may raise: nothing has changed so far
        groups[root] = group
        group.replicas[replica.url] = replica
        replica.root, replica.models, replica.info = root, models, info
        self._index_names()
        self.update_availability(group.replicas.values())

    def rename(self, replica: Replica, models: tuple[str, ...], adapters: dict[str, str]) -> None:
        """Set the names and adapters that the replica serves now; the knowledge about its cache stays."""
        replica.models, replica.adapters = models, adapters
        self._index_names()

    def detach(self, replica: Replica) -> None:
        """Take the replica out of service and free its address; its requests in flight continue until `forget`."""
        self._leave_group(replica)
        if self.replicas.get(replica.url) is replica:
            del self.replicas[replica.url]
        self.detached.add(replica)

    def forget(self, replica: Replica) -> None:
        self.detach(replica)
        self.detached.remove(replica)
        replica.pool.close()

    def group_with(self, replica: Replica) -> ReplicaGroup | None:
        """Return the replica's group; None while its models are unknown."""
        return self._groups_beside(replica).get(replica.root or "")

    def all_groups(self) -> Iterator[tuple[str, ReplicaGroup]]:
        """Yield (role of the replicas, group)."""
        for group in self.groups.values():
            yield "both" if group.prefills is None else "decode", group
        for group in self.prefills.values():
            yield "prefill", group

    def group_of(self, model: str | None) -> ReplicaGroup:
        """Return the group that serves `model`, which may be None if there is one group. Raise HttpError without one."""
        if model is None and len(self.groups) == 1:
            return next(iter(self.groups.values()))
        group = self._by_name.get(model or "")
        if group is not None:
            return group
        if not self.groups:
            raise HttpError(503, "no replica has been reached yet", headers={"retry-after": "1"})
        served = ", ".join(name for group in self.groups.values() for name in group.names)
        if model is None:
            raise HttpError(400, f"model: several are served, so one must be named: {served}", param="model")
        raise HttpError(404, f"model: {clip(model)!r} is not served here; available are: {served}", param="model")

    def begin(self, replica: Replica) -> None:
        """Count a request that is sent to the replica."""
        replica.num_in_flight += 1
        replica.num_requests += 1
        self.num_in_flight += 1
        if self._is_full(replica):
            self.update_availability([replica])

    def end(self, replica: Replica) -> None:
        was_full = self._is_full(replica)
        replica.num_in_flight -= 1
        self.num_in_flight -= 1
        if was_full:
            self.update_availability([replica])

    def record_outcome(self, replica: Replica, outcome: Outcome, status: int, reason: str) -> None:
        """Update the state of a replica from the outcome of a request."""
        is_well = outcome == "answered" and (status < 500 or status in (501, 505))
        if is_well and replica.is_healthy:
            return
        now_s = time.monotonic()
        with self.observing(replica):
            if is_well:
                replica.answered()
            elif outcome == "answered":
                replica.failed(f"it answered {status}", now_s)
            elif outcome in ("unreachable", "lost"):
                replica.connection_broke(reason, now_s)
            elif outcome == "late":
                replica.failed(reason, now_s)
            elif outcome == "busy" and status == 503:
                replica.reported_draining()
        if outcome in ("unreachable", "lost") or (outcome == "busy" and status == 503):
            replica.probe_due.set()

    def refusal(self, group: ReplicaGroup, model: str | None) -> HttpError:
        """Return the error for a request without an available replica: 429 if all are full, else 503."""
        lacking = group.excluded_for(model)
        here = [each for url, each in group.replicas.items() if url not in lacking and self.is_available(each)]
        if here and all(map(self._is_full, here)):
            count = sum(each.num_in_flight for each in here)
            message = f"{count} requests are in flight at {len(here)} replicas, which is the limit (--max-requests)"
            return HttpError(429, message, headers={"retry-after": "1"})
        return HttpError(503, f"no replica of {clip(group.root)!r} is available", headers={"retry-after": "1"})

    def update_availability(self, replicas: Iterable[Replica]) -> None:
        """Tell the placement which of these replicas take requests."""
        for replica in replicas:
            group = self.group_with(replica)
            if group is not None:
                is_open = self.is_available(replica) and not self._is_full(replica)
                group.placement.set_available(replica.url, is_open)

    def is_available(self, replica: Replica) -> bool:
        if replica.is_up:
            return True
        group = self.group_with(replica)
        return replica.state in EXCLUDED_FOR_FAILURES and group is not None and replica not in self._excluded(group)

    @contextmanager
    def observing(self, replica: Replica) -> Iterator[None]:
        """Apply a change of state made in the block, as in `with fleet.observing(replica): replica.failed(…)`. Requests
        waiting at a replica that went down move to other replicas."""
        before, was_down = replica.state, replica.is_down
        try:
            yield
        finally:
            if replica.state != before:
                log.info("%s: %s → %s (%s)", replica.url, before, replica.state, replica.reason)
                group = self.group_with(replica)
                if group is not None:  # how many failing replicas are excluded depends on all of them
                    self.update_availability(group.replicas.values())
            if replica.is_down and not was_down:
                self._on_down(replica)

    def views(self) -> Iterator[dict[str, Any]]:
        seen: dict[str, tuple[str | None, dict[str, Any] | None]] = {}
        for side, group in self.all_groups():
            seen |= {url: (side, view) for url, view in group.placement.view().items()}
        for replica in self.replicas.values():
            role, known = seen.get(replica.url, (None, None))
            yield {
                "url": replica.url,
                "role": role,
                "peer": replica.peer,
                "state": replica.state,
                "reason": replica.reason,
                "models": list(replica.models),
                "is_available": replica.root is not None and self.is_available(replica),
                "requests_in_flight": replica.num_in_flight,
                "requests": replica.num_requests,
                "failures": replica.num_failures,
                "ejections": replica.num_ejections,
                "placement": known,
                "events": None if replica.link is None else replica.link.view(),
            }

    def _excluded(self, group: ReplicaGroup) -> set[Replica]:
        """Return the failing replicas to exclude: ejected ones first, at most `max_ejected_share` of the group."""
        room = int(len(group.replicas) * self.config.timeouts.max_ejected_share)
        out = [each for each in group.replicas.values() if each.state in EXCLUDED_FOR_FAILURES]
        out.sort(key=lambda each: (each.state != "ejected", each.url))
        return set(out[:room])

    def _is_full(self, replica: Replica) -> bool:
        group = self.group_with(replica) if replica.state == "trial" else None
        is_held_back = group is not None and replica in self._excluded(group)
        return replica.num_in_flight >= (1 if is_held_back else self.config.max_requests)

    def _index_names(self) -> None:
        self._by_name = {name: group for group in self.groups.values() for name in group.names}
        for _, group in self.all_groups():
            group.is_mixed = len({replica.models for replica in group.replicas.values()}) > 1
            group.adapters = {name: key for each in group.replicas.values() for name, key in each.adapters.items()}
        for root, group in self.groups.items():
            group.prefills = self.prefills.get(root)
            if group.prefills is not None and not {*group.names} <= {*group.prefills.names}:
                group.prefills.is_mixed = True  # a prompt for another name is computed where it is answered

    def _groups_beside(self, replica: Replica) -> dict[str, ReplicaGroup]:
        return self.groups if replica.peer is None else self.prefills

    def _leave_group(self, replica: Replica) -> None:
        group = self.group_with(replica)
        if group is not None and group.replicas.pop(replica.url, None) is not None:
            group.placement.remove_replica(replica.url)
            self.update_availability(group.replicas.values())  # of a smaller group fewer are excluded
            if not group.replicas:
                del self._groups_beside(replica)[group.root]
        replica.root, replica.models = None, ()
        self._index_names()

    def check(self) -> None:
        replicas = [*self.replicas.values(), *self.detached]
        assert self.num_in_flight == sum(replica.num_in_flight for replica in replicas)
        for _, group in self.all_groups():
            assert group.replicas, f"the group {group.root} is empty"
            assert all(self.replicas.get(url) is each for url, each in group.replicas.items())
        for replica in replicas:
            replica.check()


class RetryBudget:
    """Limits retries to a share of the requests, so that they do not overload a failing fleet: a token bucket, to which every
    request adds `share` tokens, and from which every retry takes one.

    Its capacity is half of the requests in flight: when a replica dies, all its requests are retried at once, and over
    time the extra load is still limited to `share`.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.tokens = float(RESERVE)

    def deposit(self, num_in_flight: int) -> None:
        """Add the tokens of a new request; `num_in_flight` counts the requests in flight before it."""
        room = num_in_flight / 2
        tokens, room = self.tokens + self.share, room if room > RESERVE else RESERVE
        self.tokens = tokens if tokens < room else room

    def take(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True
