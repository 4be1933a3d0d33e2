"""A cluster of no machines: processes that a test starts, readies and kills by assignment, under a clock of its own."""

from collections.abc import Mapping, Sequence

from penstock.router.deploy.child import Sight
from penstock.router.deploy.file import Deployment, Restart, Rollout, Template
from penstock.router.deploy.parts import SlotReplica
from penstock.router.deploy.supervisor import Supervisor


def deployment(
    count: int = 2,
    words: str = "one",
    *,
    router_words: tuple[str, ...] = ("route",),
    rollout: Rollout = Rollout(ready_s=60.0, drain_s=5.0),  # noqa: B008  (frozen)
    restart: Restart = Restart(limit=2, pause_s=1.0, stable_s=30.0),  # noqa: B008
) -> Deployment:
    template = Template(words=(words,), cpus=1.0, gpus=0.0, num_ranks=1, resources={}, env={"A": "b"})
    return Deployment(
        name="test",
        count=count,
        template=template,
        router_words=router_words,
        router_cpus=0.0,
        rollout=rollout,
        restart=restart,
    )


class Process:
    """Runs from its start; comes up when the test says so; ends when it is drained."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], url: str) -> None:
        self.words, self.env, self.url = list(words), dict(env), url
        self.has_place, self.is_up, self.is_killed = True, False, False
        self.death: str | None = None
        self.is_draining = False
        self.ignores_drain = False

    def look(self) -> Sight:
        pid = 1 if self.has_place else None
        return Sight(self.death is not None, pid, "node", self.url if self.is_up else None, self.death or "")

    def drain(self) -> None:
        self.is_draining = True
        if not self.ignores_drain:
            self.death = "ended with code 0"

    def kill(self) -> None:
        self.is_killed = True
        self.death = self.death or "killed by signal 9"

    @property
    def is_running(self) -> bool:
        return self.death is None


class World:
    """The cluster, the router that runs in it, and what its supervisor sees of both."""

    def __init__(self, wanted: Deployment, *, comes_up: bool = True) -> None:
        self.now_s = 0.0
        self.comes_up = comes_up  # whether what is started is ready a tick later
        self.is_full = False
        self.routers: list[Process] = []
        self.processes: list[Process] = []
        self.behind: dict[str, str] = {}
        self.in_flight: set[str] = set()  # URLs with requests: they stay `removing` until these are done
        self.hung: set[str] = set()  # URLs that do not answer the router
        self.is_router_silent = False
        self.fewest_up: list[int] = []
        self.supervisor = Supervisor(wanted, self, {"PENSTOCK_API_KEY": "client"})

    # As the cluster.

    def replica(self, name: str, template: Template, drain_s: float, env: Mapping[str, str]) -> Process:
        process = Process([*template.words, f"{drain_s:g}"], env, f"http://node:{len(self.processes) + 1}")
        process.has_place = not self.is_full
        self.processes.append(process)
        return process

    def router(self, words: Sequence[str], cpus: float, env: Mapping[str, str]) -> Process:
        router = Process(words, env, "http://front:80")
        router.is_up = True
        self.routers.append(router)
        self.behind = {word: "starting" for word in words if word.startswith("http://node")}
        return router

    def gate(self, url: str, admin_key: str) -> "World":
        assert admin_key == self.routers[-1].env["PENSTOCK_ADMIN_API_KEY"]
        return self

    def room(self, template: Template) -> str:
        return "it needs CPU 1 (of 0 0 are free)"

    # As the router.

    def states(self) -> dict[str, str] | None:
        return None if self.is_router_silent or not self.routers[-1].is_running else dict(self.behind)

    def add(self, url: str) -> dict[str, str] | None:
        self.behind[url] = "starting"
        return self.behind

    def remove(self, url: str) -> dict[str, str] | None:
        self.behind[url] = "removing"
        return self.behind

    # As the test.

    def run(self, ticks: int = 40, tick_s: float = 0.2) -> "World":
        for _ in range(ticks):
            self.now_s += tick_s
            for process in self.processes:
                if self.comes_up and process.has_place and process.is_running:
                    process.is_up = True
            up = {process.url for process in self.processes if process.is_up and process.is_running} - self.hung
            for url, state in list(self.behind.items()):
                if state != "removing":
                    self.behind[url] = "up" if url in up else "down"
                elif url not in self.in_flight:
                    del self.behind[url]
            self.fewest_up.append(list(self.behind.values()).count("up"))
            self.supervisor.tick(self.now_s)
        return self

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.is_running]

    def process_of(self, replica: SlotReplica) -> Process:
        assert isinstance(replica.handle, Process)
        return replica.handle

    def said(self) -> str:
        return "\n".join(self.supervisor.updates(0)[1])
