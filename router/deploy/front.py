"""The deployment's router: its process, which is started again when it dies, and who is behind it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.router.deploy.child import Sight
from penstock.router.deploy.file import Deployment
from penstock.router.deploy.parts import Cluster, Gate, Line, ProcessHandle, Starts


class Front:
    """`env`: what only the router's process gets to see, its keys among them."""

    def __init__(self, cluster: Cluster, env: Mapping[str, str], admin_key: str, say: Callable[[str], None]) -> None:
        self.url: str | None = None  # stays the same from the first start on
        self._cluster, self._env, self._admin_key, self._say = cluster, env, admin_key, say
        self._handle: ProcessHandle | None = None
        self._gate: Gate | None = None
        self._sight = Sight()
        self._starts = Starts()
        self._ready_since_s: float | None = None

    @property
    def is_gone(self) -> bool:
        return self._handle is None

    @property
    def is_ready(self) -> bool:
        return self._gate is not None

    def states(self) -> dict[str, str] | None:
        """What the router thinks of each replica; None while it cannot be asked."""
        return None if self._gate is None else self._gate.states()

    def see(self, now_s: float, wanted: Deployment, backends: Sequence[str]) -> str | None:
        """Start it, or start it again; returns why it could not be started the first time."""
        if self._handle is None:
            if self._starts.may_start(now_s, wanted.restart):
                self._handle = self._start(wanted, backends)
            return None
        sight = self._sight = self._handle.look()
        if sight.is_gone:
            return self._died(sight.last_words, now_s, wanted)
        if self._gate is None and sight.url is not None:
            self._gate, self._ready_since_s = self._cluster.gate(sight.url, self._admin_key), now_s
            self._say(f"the router listens on {sight.url}: process {sight.pid} on {sight.node}")
            self.url = sight.url
        return None

    def let_in(self, urls: Collection[str], states: Mapping[str, str]) -> None:
        """Behind the router shall be these and no others."""
        assert self._gate is not None
        for url in urls:
            if url not in states:
                self._gate.add(url)
        for url, state in states.items():
            if url not in urls and state != "removing":
                self._gate.remove(url)

    def forgive(self) -> None:
        """Try again also after too many deaths."""
        if self._handle is None:
            self._starts = Starts()

    def drain(self) -> None:
        if self._handle is not None and self._gate is not None:
            self._handle.drain()
        else:
            self.kill()

    def look(self) -> None:
        """While it drains: see whether it has ended."""
        if self._handle is not None and self._handle.look().is_gone:
            self.kill()

    def kill(self) -> None:
        if self._handle is not None:
            self._handle.kill()
        self._handle = self._gate = None

    def line(self, wanted: Deployment) -> Line:
        state = "ready" if self._gate is not None else "starting"
        if self._handle is None:
            state = "given up" if self._starts.is_over(wanted.restart) else "dead"
        return self._starts.line("router", state, self._sight)

    def _start(self, wanted: Deployment, backends: Sequence[str]) -> ProcessHandle:
        words = [*wanted.router_words, "--drain-timeout", f"{wanted.rollout.drain_s:g}"]
        if self.url is not None:  # as before, also where any port would have done
            words += ["--port", self.url.rpartition(":")[2]]
        for url in backends:
            words += ["--backend", url]
        return self._cluster.router(words, wanted.router_cpus, self._env)

    def _died(self, reason: str, now_s: float, wanted: Deployment) -> str | None:
        self.kill()
        self._say(f"the router {reason}")
        if self.url is None:
            return f"the router {reason}"
        self._starts.died(reason, self._ready_since_s, now_s, wanted.restart)
        if self._starts.is_over(wanted.restart):
            self._say(f"the router is left alone: it has died {self._starts.failures} times in a row")
        return None
