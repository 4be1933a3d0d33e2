"""Deployments on Ray: one actor for each process and one that supervises them. All of Ray in this folder is here.

The supervisor's actor stands on the node where the deployment was started, and so does the router's. It owns the
others: when it ends, or the driver that it belongs to, Ray ends them, and their processes end with them.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks.cluster import join
from penstock.router.deploy.child import Child, Sight
from penstock.router.deploy.file import DeployError, Deployment, Template
from penstock.router.deploy.gate import HttpGate
from penstock.router.deploy.parts import View
from penstock.router.deploy.supervisor import Supervisor

NAMESPACE = "penstock"
TICK_S = 0.2
ANSWER_S = 60.0  # for an actor of ours to answer a question


def connect(address: str | None, allow_open_dashboard: bool, may_start: bool) -> str:
    """Join a cluster, or start one that lives as long as this process; says which, in words."""
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
    try:
        return f"Ray cluster at {join(address, allow_open_dashboard, **options)}"
    except ExecutorError as error:
        is_absent = isinstance(error.__cause__, ConnectionError)
        if not is_absent or not may_start or address is not None or "RAY_ADDRESS" in os.environ:
            raise DeployError(str(error).removeprefix("executor: ")) from error
    ray.init(include_dashboard=False, **options)
    return "No Ray cluster runs here: one on this machine alone, which ends with this command"


class Remote:
    """A deployment's supervisor in its actor, as the command line talks to it."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self._actor = name, actor

    @classmethod
    def find(cls, name: str) -> "Remote | None":
        try:
            return cls(name, ray.get_actor(name, NAMESPACE))
        except ValueError:
            return None

    @classmethod
    def start(cls, deployment: Deployment, router_env: Mapping[str, str], is_detached: bool) -> "Remote":
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        try:
            actor = (
                ray.remote(SupervisorActor)
                .options(
                    name=deployment.name,
                    namespace=NAMESPACE,
                    lifetime="detached" if is_detached else None,
                    num_cpus=0,
                    max_concurrency=8,
                    scheduling_strategy=here,
                )
                .remote(deployment, dict(router_env))
            )
            ray.get(actor.ask.remote("view"), timeout=ANSWER_S)
        except (RayError, ValueError) as error:
            raise DeployError(f"{deployment.name}: Ray could not start its supervisor: {error}") from error
        return cls(deployment.name, actor)

    def roll(self, deployment: Deployment) -> str:
        return str(self._ask("roll", deployment))

    def stop(self) -> None:
        self._ask("stop")

    def updates(self, since: int) -> tuple[int, list[str]]:
        num_said, lines = self._ask("updates", since)
        return num_said, lines

    def view(self) -> View:
        view = self._ask("view")
        assert isinstance(view, View)
        return view

    def end(self) -> None:
        """The actor, and with it whatever it still owns. Its name is free afterwards."""
        ray.kill(self._actor)
        until_s = time.monotonic() + ANSWER_S
        while Remote.find(self._name) is not None and time.monotonic() < until_s:
            time.sleep(0.05)

    def _ask(self, question: str, *words: Any) -> Any:
        try:
            answer = ray.get(self._actor.ask.remote(question, *words), timeout=ANSWER_S)
        except RayError as error:
            raise DeployError(f"{self._name}: its supervisor does not answer: {_one_line(error)}") from None
        if isinstance(answer, DeployError):
            raise answer
        return answer


class SupervisorActor:
    """The supervisor, in a process of its own. One thread ticks; others answer."""

    def __init__(self, deployment: Deployment, router_env: dict[str, str]) -> None:
        self._supervisor = Supervisor(deployment, RayCluster(), router_env)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, question: str, *words: Any) -> Any:
        """What a method of the supervisor answers, or its DeployError."""
        with self._lock:
            try:
                return getattr(self._supervisor, question)(*words)
            except DeployError as error:
                return error

    def _run(self) -> None:
        last = ""
        while self._supervisor.phase != "down":
            with self._lock:
                try:
                    self._supervisor.tick(time.monotonic())
                except Exception as error:  # the top of the process: what runs must not be left to itself
                    traceback.print_exc()
                    if last != (last := f"{type(error).__name__}: {error}"):
                        self._supervisor.say(f"the supervisor goes on after {last}")
            time.sleep(TICK_S)


class RayCluster:
    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        self._address = {"RAY_ADDRESS": context.gcs_address}  # for `--executor ray` in a replica

    def replica(self, name: str, template: Template, drain_s: float, env: Mapping[str, str]) -> "RayHandle":
        words = [*template.words, "--port", "0", "--drain-timeout", f"{drain_s:g}"]
        needs = {"num_cpus": template.cpus, "num_gpus": _gpus(template), "resources": template.resources}
        return RayHandle(words, {**self._address, **env}, True, name=name, scheduling_strategy="SPREAD", **needs)

    def router(self, words: Sequence[str], cpus: float, env: Mapping[str, str]) -> "RayHandle":
        return RayHandle(words, env, False, scheduling_strategy=self._here, num_cpus=cpus)

    def gate(self, url: str, admin_key: str) -> HttpGate:
        return HttpGate(url, admin_key)

    def room(self, template: Template) -> str:
        needs = {"CPU": template.cpus, "GPU": _gpus(template), **template.resources}
        free, total = ray.available_resources(), ray.cluster_resources()
        said = [
            f"{kind} {need:g} (of {total.get(kind, 0):g} {free.get(kind, 0):g} are free)"
            for kind, need in needs.items()
            if need
        ]
        return f"on one node it needs {', '.join(said)}"


def _gpus(template: Template) -> float:
    if template.gpus is not None:
        return template.gpus
    return float(template.num_ranks) if ray.cluster_resources().get("GPU") else 0.0


class RayHandle:
    """A process beneath an actor of its own. Questions are asked one at a time and never waited for."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], is_told_host: bool, **options: Any) -> None:
        self._sight = Sight()
        self._actor: Any = None
        self._asked: Any = None
        try:
            actor = ray.remote(ChildActor).options(namespace=NAMESPACE, max_concurrency=2, **options)
            self._actor = actor.remote(list(words), dict(env), is_told_host)
        except Exception as error:  # whatever Ray refuses: a start that failed, as any other
            self._sight = Sight(is_gone=True, last_words=f"could not be started: {_one_line(error)}")

    def look(self) -> Sight:
        if self._asked is None and self._actor is not None:
            self._asked = self._actor.look.remote()
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._sight = ray.get(self._asked)
            except RayError as error:
                last_words = f"lost its actor: {_one_line(error)}"
                self._sight = msgspec.structs.replace(self._sight, is_gone=True, last_words=last_words)
            self._asked = None
        return self._sight

    def drain(self) -> None:
        if self._actor is not None:
            self._actor.drain.remote()

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)


class ChildActor(Child):
    """A child in the actor's process."""

    def __init__(self, words: list[str], env: dict[str, str], is_told_host: bool) -> None:
        address = ray.util.get_node_ip_address()
        super().__init__([*words, "--host", address] if is_told_host else words, env, address)
        self.start()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
