"""The executor over a Ray cluster of two nodes on this machine: the first rank by shared memory, the second by TCP.

The driver is a process of its own (ray_driver.py), as in service, so that it can be killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.executor.small_models import folder, greedy
from tests.executor.test_multiproc import _lives

pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")

HERE = Path(__file__).parent
PROMPT, COUNT = [5, 6, 7, 8, 9], 12  # what ray_driver.py asks


class Program:
    """A Python program that prints a line of JSON for everything it has to say."""

    def __init__(self, name: str, *arguments: str, before: Sequence[str] = (), **environment: str) -> None:
        """`before`: the words of a command that runs it."""
        self.process = subprocess.Popen(
            [*before, sys.executable, str(HERE / name), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path]), **environment},
        )

    def line(self, mark: str) -> str:
        """The next line that begins like this; Ray prints others in between."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(mark):
                return line.strip()
        raise AssertionError("the program ended without a word")

    def heard(self) -> dict:
        return json.loads(self.line("{"))

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Program]:
    cluster = Program("ray_cluster.py")
    cluster.address = cluster.heard()["address"]  # type: ignore[attr-defined]
    yield cluster
    cluster.end()


@pytest.fixture
def drivers(cluster: Program) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for driver in started:
        driver.process.kill()
        driver.end()


def start(cluster: Program, drivers: list[Program], ranks: int) -> Program:
    address = cluster.address  # type: ignore[attr-defined]
    drivers.append(Program("ray_driver.py", str(folder("llama")), str(ranks), RAY_ADDRESS=address))
    return drivers[-1]


def all_gone(pids: list[int], timeout_s: float = 30.0) -> bool:
    until = time.monotonic() + timeout_s
    while any(map(_lives, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(_lives, pids))


def test_two_nodes_give_the_tokens_of_one_process_and_end_when_told(cluster: Program, drivers: list[Program]) -> None:
    driver = start(cluster, drivers, 2)
    said = driver.heard()
    assert said["tokens"] == greedy("llama", PROMPT, COUNT)[0]
    driver.tell("enough")
    assert driver.heard() == {"closed": True}
    assert driver.process.wait(20) == 0
    assert all_gone(said["pids"])


def test_more_ranks_than_the_cluster_holds_is_said_with_both_numbers(
    cluster: Program, drivers: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_PLACE_TIMEOUT_S", "2")
    error = start(cluster, drivers, 4).heard()["error"]
    assert "tensor_parallel_size: 4 given; every rank needs one CPU, and the Ray cluster has 2" in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_actor_ends_the_executor_by_name_and_leaves_no_other(
    cluster: Program, drivers: list[Program], rank: int
) -> None:
    driver = start(cluster, drivers, 2)
    said = driver.heard()
    os.kill(said["pids"][rank], signal.SIGKILL)
    assert said["names"][rank] in driver.heard()["error"]
    assert all_gone(said["pids"])


def test_actors_end_with_a_driver_that_is_killed(cluster: Program, drivers: list[Program]) -> None:
    driver = start(cluster, drivers, 2)
    pids = driver.heard()["pids"]
    driver.process.kill()
    assert all_gone(pids)


def test_a_lost_node_ends_the_executor_by_the_name_of_its_rank(cluster: Program, drivers: list[Program]) -> None:
    """Last in the file: the cluster has one node afterwards."""
    driver = start(cluster, drivers, 2)
    said = driver.heard()
    cluster.tell("remove")
    assert said["names"][1] in driver.heard()["error"]
    assert all_gone(said["pids"])


@pytest.mark.parametrize(
    ("url", "token", "is_refused"),
    [
        ("127.0.0.1:8265", "", False),
        ("http://[::1]:8265", "", False),
        ("localhost:8265", "", False),
        ("10.1.2.3:8265", "", True),
        ("http://ray.example.org:8265", "", True),
        ("10.1.2.3:8265", "token", False),
    ],
)
def test_a_dashboard_that_takes_jobs_from_the_network_is_refused(
    url: str, token: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.executor.ray import is_open

    monkeypatch.setenv("RAY_AUTH_MODE", token)
    assert is_open(url) == is_refused
