"""The executor over a Ray cluster of two nodes on this machine: the first rank by shared memory, the second by TCP.

The driver is a process of its own (ray_driver.py), as in service, so that it can be killed.
"""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.executor.ranks.network import Hub, Spoke
from penstock.executor.ranks.wire import Beat
from tests.support.programs import Program, all_gone
from tests.support.refusals import cases, table
from tests.support.small_models import folder, greedy

# Starting a cluster and importing torch and Ray in each actor takes most of a minute on two quiet cores: `.ci/run` runs
# the slow tests.
pytestmark = pytest.mark.timeout(900)

pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
ray_executor = pytest.importorskip("penstock.executor.ranks.ray_executor")

SUPPORT = Path(__file__).parents[1] / "support"
PROMPT, COUNT = [5, 6, 7, 8, 9], 12  # what ray_driver.py asks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Program]:
    cluster = Program(SUPPORT / "ray_cluster.py")
    cluster.address = cluster.heard()["address"]  # type: ignore[attr-defined]
    yield cluster
    cluster.end()


def driver_of(cluster: Program, *before: str) -> Program:
    return Program(SUPPORT / "ray_driver.py", str(folder("llama")), before=before, RAY_ADDRESS=cluster.address)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def driver(cluster: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Start one driver for many runs, as each driver imports torch and Ray. Its folder has a file with the name of a
    library, which must not be imported."""
    here = tmp_path_factory.mktemp("downloaded")
    (here / "zmq.py").write_text("raise SystemExit('imported')")
    driver = driver_of(cluster, "env", f"--chdir={here}")
    yield driver
    driver.end()


def run(driver: Program, ranks: int = 2, place_timeout_s: float = 300.0, can_kill: bool = True) -> dict[str, Any]:
    driver.send(json.dumps({"num_ranks": ranks, "place_timeout_s": place_timeout_s, "can_kill": can_kill}))
    return driver.heard()


@pytest.mark.slow
def test_two_nodes_give_the_tokens_of_one_process_and_end_when_asked(driver: Program) -> None:
    said = run(driver)
    assert said["tokens"] == greedy("llama", PROMPT, COUNT)[0]
    driver.send("enough")
    assert driver.heard() == {"closed": True}
    assert all_gone(said["pids"])


@pytest.mark.slow
def test_more_ranks_than_the_cluster_holds_are_refused_with_both_numbers(driver: Program) -> None:
    error = run(driver, ranks=4, place_timeout_s=2.0)["error"]
    assert "tensor_parallel_size: 4 given; every rank needs one CPU, and the Ray cluster has 2" in error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_actor_ends_the_executor_by_name_and_leaves_no_other(driver: Program, rank: int) -> None:
    said = run(driver)
    os.kill(said["pids"][rank], signal.SIGKILL)
    assert said["names"][rank] in driver.heard()["error"]
    assert all_gone(said["pids"])


@pytest.mark.slow
def test_actors_end_with_a_driver_that_is_killed(cluster: Program) -> None:
    driver = driver_of(cluster)
    pids = run(driver)["pids"]
    driver.process.kill()
    driver.end()
    assert all_gone(pids)


@pytest.mark.slow
def test_actors_end_although_ray_does_not_kill_them(cluster: Program) -> None:
    driver = driver_of(cluster)
    pids = run(driver, can_kill=False)["pids"]
    driver.send("enough")
    assert driver.heard() == {"closed": True}
    gone = all_gone(pids)
    driver.end()
    assert gone


@pytest.mark.slow
def test_a_lost_node_ends_the_executor_by_the_name_of_its_rank(cluster: Program, driver: Program) -> None:
    """Last of those on the cluster, which has one node afterwards."""
    said = run(driver)
    cluster.send("remove")
    assert said["names"][1] in driver.heard()["error"]
    assert all_gone(said["pids"])
    driver.process.stdin.close()  # type: ignore[union-attr]
    assert driver.process.wait(60) == 0


def test_a_rank_that_cannot_be_reached_is_not_asked_for_its_stacks() -> None:
    """Beyond a cut cable: the executor that gives up has to say why, whichever notices first, it or the connection."""
    with contextlib.closing(Hub("127.0.0.1")) as hub:
        with pytest.raises(ConnectionError, match="rank 0 cannot be reached"):
            hub.send(0, [b"anything"])
        ray_executor.ActorProcess(0, ray_executor.Location("a node", "127.0.0.1", 1), None, None, hub).dump_stacks()


@pytest.mark.parametrize(("error", "end"), cases(__file__, "ends of actors", **vars(ray_executor)))
def test_the_end_of_an_actor_is_found_without_waiting_and_kept(
    error: Exception | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Mock(side_effect=[([], ["done"]), (["done"], [])])  # it runs, and then no longer
    monkeypatch.setattr(ray_executor, "ray", Mock(wait=wait, get=Mock(side_effect=error)))
    actor = ray_executor.ActorProcess(0, ray_executor.Location("a node", "127.0.0.1", 1), None, "done", None)
    assert [actor.death() for _ in range(3)] == [None, end, end]
    wait.assert_called_with(["done"], timeout=0)


def test_a_rank_that_reports_can_be_sent_to() -> None:
    """Steps and reports are two connections, and that of the steps may be the later one."""
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with contextlib.closing(Hub("127.0.0.1")) as hub, late_way_to(hub.ticket(0).steps, 0.5) as steps:
        ticket = msgspec.structs.replace(hub.ticket(0), steps=steps)
        with contextlib.closing(Spoke(ticket, lambda message: heard.put(bytes(message[0])))) as spoke:
            spoke.report(Beat("waiting"))
            assert list(hub.receive(10.0)) == [(0, Beat("waiting"))]
            hub.send(0, [b"a step"])
            assert heard.get(timeout=60) == b"a step"


@contextlib.contextmanager
def late_way_to(address: str, delay_s: float) -> Iterator[str]:
    """Open a port whose one connection leads to an address, but moves no byte at first."""
    host, port = address.removeprefix("tcp://").split(":")

    def lead() -> None:
        time.sleep(delay_s)
        here, _ = server.accept()
        with here, socket.create_connection((host, int(port))) as there:
            other = {here: there, there: here}
            while data := [(other[end], end.recv(65536)) for end in select.select(list(other), [], [])[0]]:
                for end, received in data:
                    if not received:
                        return
                    end.sendall(received)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lead)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


@pytest.mark.parametrize(("url", "token", "is_refused"), table(__file__, "dashboards"))
def test_an_open_dashboard_is_refused(url: str, token: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", token)
    assert ray_executor.is_open(url) == is_refused
