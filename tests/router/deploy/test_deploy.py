"""`penstock deploy` over a Ray cluster of two nodes on this machine, under load: deaths, roll-outs, the end.

The replicas are mock ones and the router is the real one, all of them processes; one slow test takes real replicas.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import ray_cluster
from tests.support.fake_engine import byte_tokenizer
from tests.support.fork_server import ROOT
from tests.support.programs import Program, all_gone
from tests.support.router_fleet import until
from tests.test_serve import MODEL

pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")

MOCK = Path(__file__).parents[2] / "support" / "mock_deploy.py"
BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
KEY = {"authorization": "Bearer client"}


def test_what_ray_refuses_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.router.deploy import cluster
    from penstock.router.deploy.child import Sight

    def refuse(_kind: type) -> None:
        raise TypeError("not that")

    monkeypatch.setattr("ray.remote", refuse)
    handle = cluster.RayHandle([], {}, False)
    handle.drain()
    handle.kill()
    assert handle.look() == Sight(is_gone=True, last_words="could not be started: not that")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = Program(ray_cluster.__file__)
    yield cluster.heard()["address"]
    cluster.end()


class Deployed:
    """A file and the commands that are given it."""

    def __init__(self, folder: Path, address: str, command: tuple[str, ...] = (str(MOCK),)) -> None:
        self.file = folder / "deploy.toml"
        self._words = [*command, str(self.file), "--address", address]
        self._env = {"PENSTOCK_API_KEY": "client"}

    def write(self, seed: int, count: int = 2, settings: str = "") -> None:
        self.file.write_text(f"""
            name = "{self.file.parent.name.replace("_", "-").lower()[:40]}"
            [model]
            seed = {seed}
            {settings}
            [replicas]
            count = {count}
            cpus = 0.5
            [router]
            port = 0
            probe-interval = 0.1
            [rollout]
            drain-s = 10
            [restart]
            pause-s = 0.1
        """)

    def start(self) -> Program:
        return Program(*self._words, **self._env)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        return subprocess.run(
            [sys.executable, *self._words, *options],
            env={**os.environ, "PYTHONPATH": path, **self._env},
            capture_output=True,
            text=True,
            timeout=100,
        )


@contextmanager
def load(url: str) -> Iterator[Counter[int]]:
    """Four clients that ask one thing after the other; how often each status came."""
    seen: Counter[int] = Counter()
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, headers=KEY, timeout=30) as http:
            while not over.is_set():
                seen[http.post("/v1/completions", json=BODY).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def listens(stays: Program) -> tuple[str, int]:
    """URL and process of the router that comes up."""
    said = re.search(r"(http://\S+): process (\d+)", stays.line("the router listens on "))
    assert said is not None
    return said[1], int(said[2])


def ready(said: str) -> dict[str, int]:
    """The processes of replicas that came up, by name."""
    return {name: int(pid) for name, pid in re.findall(r"(replica \d+ of version \d+) is ready: process (\d+)", said)}


@pytest.mark.timeout(400)  # a dozen processes are started, one after the other
def test_it_serves_through_a_death_a_new_version_and_a_bad_one_and_leaves_nothing(tmp_path: Path, address: str) -> None:
    deployed = Deployed(tmp_path, address)
    deployed.write(seed=1)
    stays = deployed.start()
    url, router = listens(stays)
    first = ready(stays.line("replica") + stays.line("replica"))
    assert set(first) == {"replica 0 of version 1", "replica 1 of version 1"}
    stays.line("version 1 serves: 2 replicas")
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 401
    with load(url) as seen:
        until(lambda: seen[200] >= 20)
        os.kill(first["replica 0 of version 1"], signal.SIGKILL)
        stays.line("replica 0 of version 1 was killed by SIGKILL")
        again = ready(stays.line("replica 0 of version 1 is ready"))
        deployed.write(seed=2)
        rolled = deployed.run()
        assert rolled.returncode == 0 and "version 2 serves: 2 replicas" in rolled.stdout, rolled
        deployed.write(seed=-1)
        refused = deployed.run()
        assert refused.returncode == 1
        assert "Not rolled out: replica 0 of version 3 ended with code 3: penstock: the weights" in refused.stdout
        before = seen.total()
        until(lambda: seen.total() > before + 20)
    assert set(seen) == {200}
    second = ready(rolled.stdout)
    assert all_gone([*first.values(), *again.values()])
    for pid in (router, *second.values()):
        assert b"key" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    stays.process.send_signal(signal.SIGINT)
    stays.line("everything has ended")
    assert stays.process.wait(60) == 0
    stays.end()
    assert all_gone([router, *second.values()])


@pytest.mark.slow
def test_nothing_is_left_of_one_whose_command_is_killed(tmp_path: Path, address: str) -> None:
    deployed = Deployed(tmp_path, address)
    deployed.write(seed=1)
    stays = deployed.start()
    _, router = listens(stays)
    replicas = ready(stays.line("replica") + stays.line("replica"))
    stays.process.kill()
    stays.end()
    assert all_gone([router, *replicas.values()])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_replicas_run_on_detached_grow_get_their_router_back_and_end(tmp_path: Path, address: str) -> None:
    deployed = Deployed(tmp_path, address, ("-m", "penstock.cli", "deploy"))
    byte_tokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = 'model = "."\nload-format = "dummy"\nkv-cache-bytes = "8MiB"\nserved-model-name = "tiny"'
    deployed.write(seed=1, settings=settings)
    started = deployed.run("--detach")
    assert started.returncode == 0 and "runs on in the cluster" in started.stdout, started
    deployed.write(seed=1, count=3, settings=settings)
    grown = deployed.run()
    assert grown.returncode == 0 and "version 1 stays" in grown.stdout
    replicas = ready(started.stdout + grown.stdout)
    assert len(replicas) == 3
    shown = deployed.run("--status")
    found = re.search(r"router +ready +process (\d+) on \S+ +(http://\S+)", shown.stdout)
    assert shown.returncode == 0 and found is not None and shown.stdout.count(" ready ") == 4, shown
    os.kill(int(found[1]), signal.SIGKILL)
    until(lambda: asked(found[2]) == 200)
    ended = deployed.run("--down")
    assert ended.returncode == 0 and "everything has ended" in ended.stdout, ended
    assert all_gone([*replicas.values()])
    assert "no deployment of this name runs there" in deployed.run("--status").stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_of_a_lost_node_are_started_on_another(tmp_path: Path) -> None:
    cluster = Program(ray_cluster.__file__)
    deployed = Deployed(tmp_path, cluster.heard()["address"])
    deployed.write(seed=1)
    stays = deployed.start()
    url, _ = listens(stays)
    stays.line("version 1 serves: 2 replicas")
    with load(url) as seen:
        until(lambda: seen[200] >= 20)
        cluster.send("remove")
        stays.line("replica")
        assert ready(stays.line("replica"))
        before = seen.total()
        until(lambda: seen.total() > before + 20)
    assert set(seen) == {200}
    stays.process.send_signal(signal.SIGINT)
    stays.line("everything has ended")
    assert stays.process.wait(60) == 0
    stays.end()
    cluster.end()


def asked(url: str) -> int:
    try:
        return httpx.post(f"{url}/v1/completions", json=BODY, headers=KEY, timeout=30).status_code
    except httpx.TransportError:
        return 0
