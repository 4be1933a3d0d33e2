"""Decides what runs: brings the replicas and the router that exist in line with the deployment that is wanted.

`tick` is called several times a second and never waits. It knows processes only as handles and the router only
as a gate, so tests run it over made-up ones; router/deploy/cluster.py has the real ones.

A replica belongs to a slot (0 … count-1) and to a version, the number of a template. One that dies is made up for by
another in its slot. A version is rolled out by filling its slots and letting what is in excess go: out of the
router, done with what it has, stopped.
"""

import secrets
from collections import deque
from collections.abc import Mapping

from penstock.router.deploy.child import Sight
from penstock.router.deploy.file import DeployError, Deployment
from penstock.router.deploy.front import Front
from penstock.router.deploy.parts import Cluster, Phase, SlotReplica, Starts, View

LOST_S = 30.0  # a replica that was ready and that the router finds down for so long is ended: it may hang
GRACE_S = 10.0  # beyond its drain, for a process to end by itself
SLOW_PLACE_S = 5.0  # without a process: say what it waits for
MAX_SAID = 1000  # lines


class Supervisor:
    def __init__(self, deployment: Deployment, cluster: Cluster, router_env: Mapping[str, str]) -> None:
        self.wanted = deployment
        self.version = 1
        self.phase: Phase = "rolling"
        self.failure: str | None = None
        self.replicas: list[SlotReplica] = []
        self._num_said = 0
        self._said: deque[str] = deque(maxlen=MAX_SAID)
        self._previous: tuple[int, Deployment] | None = None  # while rolling: what to go back to
        self._cluster = cluster
        self._highest_version = 1
        self._num_started = 0
        self._starts: dict[int, Starts] = {}
        self._now_s = self._drain_until_s = 0.0
        # Made here; they leave only in the environment of the processes that need them.
        self._replica_key, admin_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        keys = {"PENSTOCK_ADMIN_API_KEY": admin_key, "PENSTOCK_BACKEND_API_KEY": self._replica_key}
        self.front = Front(cluster, {**router_env, **keys}, admin_key, self.say)

    # What others ask.

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        if self.phase == "down":
            return
        if self.phase == "stopping":
            self.front.look()
        else:
            ready = [str(each.sight.url) for each in self.replicas if each.state == "ready"]
            if (failure := self.front.see(now_s, self.wanted, ready)) is not None:
                self.stop(failure)
        states = self.front.states()
        for replica in list(self.replicas):
            self._see(replica, states)
        if states is not None:
            self.front.let_in(
                {each.sight.url for each in self.replicas if each.is_live and each.sight.url is not None}, states
            )
        if self.phase == "stopping":
            self._go_down()
        else:
            self._decide()

    def roll(self, deployment: Deployment) -> str:
        """Make this the wanted deployment; what that means, in words."""
        if self.phase not in ("serving", "rolling back"):
            raise DeployError(
                f"{self.wanted.name}: version {self.version} is {self.phase}; try again when that is over"
            )
        old = self.wanted
        if (deployment.router_words, deployment.router_cpus) != (old.router_words, old.router_cpus):
            raise DeployError(
                "router: it has changed, and the one that runs cannot be replaced without failed requests; "
                "take the deployment down first"
            )
        self.failure = None
        self.front.forgive()
        self._starts = {slot: each for slot, each in self._starts.items() if not each.is_over(old.restart)}
        if deployment == old:
            return f"nothing has changed: version {self.version} stays"
        self.wanted, self._previous = deployment, (self.version, old)
        self.phase = "rolling"
        if deployment.template == old.template:
            return f"version {self.version} stays, its settings change"
        self._starts.clear()
        self._highest_version += 1
        self.version = self._highest_version
        return f"version {self.version} takes the place of version {self._previous[0]}"

    def stop(self, failure: str | None = None) -> None:
        """Let the router finish what it has, then end everything."""
        if self.phase not in ("stopping", "down"):
            self.failure = failure
            self.phase = "stopping"
            self._drain_until_s = self._now_s + self.wanted.rollout.drain_s + GRACE_S
            self.front.drain()

    def updates(self, since: int) -> tuple[int, list[str]]:
        """What has been said after line number `since`."""
        fresh = self._num_said - since
        return self._num_said, list(self._said)[-fresh:] if fresh > 0 else []

    def say(self, line: str) -> None:
        self._said.append(line)
        self._num_said += 1

    def view(self) -> View:
        how, count = self.wanted.restart, self.wanted.count
        alone = {slot: starts for slot, starts in self._starts.items() if starts.is_over(how)}
        lines = [self.front.line(self.wanted)]
        for each in self.replicas:
            lines.append(self._starts.get(each.slot, Starts()).line(each.name, each.state, each.sight))
        lines += [starts.line(f"slot {slot}", "given up", Sight()) for slot, starts in alone.items()]
        num_ready = sum(each.state == "ready" for each in self.replicas)
        is_whole = self.phase == "serving" and num_ready == count and self.front.is_ready
        return View(self.wanted.name, self.phase, self.version, count, self.failure, lines, is_whole)

    # What has become of each.

    def _see(self, replica: SlotReplica, states: Mapping[str, str] | None) -> None:
        sight = replica.sight = replica.handle.look()
        drain_s, in_state_s = self.wanted.rollout.drain_s, self._now_s - replica.since_s
        if sight.is_gone:
            self._ended(replica, sight.last_words)
        elif replica.state == "leaving":
            is_out = sight.url is None or (states is not None and sight.url not in states)
            if is_out or in_state_s > drain_s:
                replica.handle.drain()
                replica.become("stopping", replica.since_s)  # the drain began when it left
        elif replica.state == "stopping":
            if sight.pid is None or in_state_s > drain_s + GRACE_S:
                self._drop(replica)
        elif self.phase != "stopping":
            state = None if states is None else states.get(str(sight.url), "unknown")
            if replica.state == "starting":
                self._see_starting(replica, state)
            else:
                self._see_ready(replica, state)

    def _see_starting(self, replica: SlotReplica, state: str | None) -> None:
        waited_s, limit_s = self._now_s - replica.since_s, self.wanted.rollout.ready_s
        has_place = replica.sight.pid is not None
        if state == "up":
            replica.become("ready", self._now_s)
            replica.ready_since_s = self._now_s
            self.say(f"{replica.name} is ready: process {replica.sight.pid} on {replica.sight.node}")
        elif waited_s > limit_s:
            room = "" if has_place else f" and found no place: {self._cluster.room(replica.template)}"
            self._ended(replica, f"was not ready within {limit_s:g} s (rollout.ready-s){room}")
        elif not has_place and waited_s > SLOW_PLACE_S and not replica.has_waited:
            replica.has_waited = True
            self.say(f"{replica.name} waits for a place: {self._cluster.room(replica.template)}")

    def _see_ready(self, replica: SlotReplica, state: str | None) -> None:
        if state not in ("down", "unknown"):
            replica.lost_since_s = None
        elif replica.lost_since_s is None:
            replica.lost_since_s = self._now_s
        elif self._now_s - replica.lost_since_s > LOST_S:
            self._ended(replica, f"was out of the router's reach for {LOST_S:g} s")

    def _ended(self, replica: SlotReplica, reason: str) -> None:
        """It is over with this process: by itself, or because we have seen enough."""
        self._drop(replica)
        if not replica.is_live or self.phase == "stopping":
            return
        self.say(f"{replica.name} {reason}")
        if replica.version != self.version:
            return
        if self.phase == "rolling" and self._is_new(replica):
            self._fail(f"{replica.name} {reason}")
            return
        starts = self._starts.setdefault(replica.slot, Starts())
        starts.died(reason, replica.ready_since_s, self._now_s, self.wanted.restart)
        if starts.is_over(self.wanted.restart):
            self.say(f"slot {replica.slot} is left alone: it has died {starts.failures} times in a row")
            if self.phase == "rolling":  # of other settings for the same version: it would never be over
                self._fail(f"{replica.name} {reason}")

    def _is_new(self, replica: SlotReplica) -> bool:
        """Whether its death says something against what is being rolled out."""
        previous = self._previous
        return previous is None or previous[0] != self.version or replica.slot >= previous[1].count

    def _drop(self, replica: SlotReplica) -> None:
        replica.handle.kill()
        self.replicas.remove(replica)

    # Which there should be.

    def _decide(self) -> None:
        how, count = self.wanted.rollout, self.wanted.count
        live = [each for each in self.replicas if each.is_live]
        ours = {each.slot: each for each in live if each.version == self.version and each.slot < count}
        excess = [each for each in live if ours.get(each.slot) is not each]
        self._fill(set(range(count)) - ours.keys(), count + how.surge - len(live) if excess else count)
        num_ready = sum(each.state == "ready" for each in live)
        for replica in sorted(excess, key=lambda each: (each.state == "ready", each.version, -each.slot)):
            if replica.state != "ready" or num_ready > count - how.max_unavailable:
                num_ready -= replica.state == "ready"
                replica.become("leaving", self._now_s)
        is_whole = len(ours) == count == len(self.replicas) and all(each.state == "ready" for each in ours.values())
        if self.phase in ("rolling", "rolling back") and is_whole:
            self.say(f"version {self.version} serves: {count} replica{'s' * (count > 1)}")
            self.phase, self._previous = "serving", None

    def _fill(self, slots: set[int], room: int) -> None:
        """Start what is missing, as far as there is room for it."""
        startable = [
            slot
            for slot in sorted(slots)
            if self._starts.get(slot, Starts()).may_start(self._now_s, self.wanted.restart)
        ]
        template = self.wanted.template
        for slot in startable[: max(room, 0)]:
            self._num_started += 1
            label = f"{self.wanted.name}.v{self.version}.{slot}.{self._num_started}"
            env = {**template.env, "PENSTOCK_API_KEY": self._replica_key}
            handle = self._cluster.replica(label, template, self.wanted.rollout.drain_s, env)
            self.replicas.append(SlotReplica(slot, self.version, template, handle, self._now_s))

    def _fail(self, reason: str) -> None:
        """The wanted deployment does not come up: back to the one before, whose replicas still serve."""
        if self._previous is None:
            self.stop(reason)
            return
        self.failure = reason
        self.say(f"version {self.version} with {self.wanted.count} cannot be rolled out")
        self.version, self.wanted = self._previous
        self.phase, self._previous = "rolling back", None
        self.say(f"back to version {self.version} with {self.wanted.count}")
        self._starts.clear()

    def _go_down(self) -> None:
        """The router first: while it drains, replicas must answer."""
        is_late = self._now_s > self._drain_until_s
        if not self.front.is_gone and not is_late:
            return
        self.front.kill()
        for replica in self.replicas:
            if replica.state != "stopping":
                replica.handle.drain()
                replica.become("stopping", self._now_s)
        if not self.replicas:
            self.phase = "down"
            self.say("everything has ended")
