"""The executor over a Ray cluster of two nodes on this machine: the first rank by shared memory, the second by TCP.

The driver is a process of its own (ray_driver.py), as in service, so that it can be killed.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.small_models import folder, greedy
from tests.programs import Program, all_gone

pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")

HERE = Path(__file__).parent
PROMPT, COUNT = [5, 6, 7, 8, 9], 12  # what ray_driver.py asks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Program]:
    cluster = Program(HERE / "ray_cluster.py")
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
    drivers.append(Program(HERE / "ray_driver.py", str(folder("llama")), str(ranks), RAY_ADDRESS=address))
    return drivers[-1]


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
    from penstock.executor.cluster import is_open

    monkeypatch.setenv("RAY_AUTH_MODE", token)
    assert is_open(url) == is_refused
