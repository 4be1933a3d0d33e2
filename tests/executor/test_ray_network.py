"""The executor over two Ray nodes with network addresses of their own: two namespaces and a cable between them.

Needs root and iproute2. Slow: Ray starts twice.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.test_ray import COUNT, PROMPT, SUPPORT, run
from tests.support.programs import Program, all_gone
from tests.support.small_models import folder, greedy

pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2's ip; make nightly runs this file",
    ),
]
SPACES = {f"penstock{number}": f"10.213.77.{number}" for number in (1, 2)}
FIRST, SECOND = SPACES
PORT = 6391
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "4" * 64}  # whatever token the user's home holds


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    try:
        for space in SPACES:
            ip("netns", "add", space)
        ip("link", "add", "cable", "netns", FIRST, "type", "veth", "peer", "name", "cable", "netns", SECOND)
    except subprocess.CalledProcessError as error:
        drop_network()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    for space, address in SPACES.items():
        ip("-n", space, "addr", "add", f"{address}/24", "dev", "cable")
        ip("-n", space, "link", "set", "cable", "up")
        ip("-n", space, "link", "set", "lo", "up")
    yield
    drop_network()


def drop_network() -> None:
    for space in SPACES:
        ip("netns", "del", space, check=False)


@pytest.fixture(scope="module")
def cluster(network: None) -> Iterator[str]:
    """Start two nodes with a core each; yield the address of the first."""
    address = f"{SPACES[FIRST]}:{PORT}"
    ray = str(Path(sys.executable).with_name("ray"))
    # Ray's sockets have to fit into 107 characters.
    room = Path("/tmp") / f"penstock-ray-{os.getpid()}"
    roles = {
        FIRST: ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={room}"],
        SECOND: [f"--address={address}"],
    }
    nodes: list[subprocess.Popen[str]] = []
    try:
        for space, role in roles.items():
            command = [ray, "start", "--block", "--num-cpus=1", f"--node-ip-address={SPACES[space]}", *role]
            nodes.append(node(space, command))
        yield address
    finally:
        for process in reversed(nodes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what Ray may have left of the node
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(room, ignore_errors=True)


def node(space: str, command: list[str]) -> "subprocess.Popen[str]":
    """Start a Ray node."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", space, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **TOKEN, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])},
        start_new_session=True,
    )
    assert process.stdout is not None
    log: list[str] = []
    while "--block" not in (line := process.stdout.readline()):
        log.append(line)
        if not line:
            process.wait()
            process.stdout.close()
            raise AssertionError("ray has not started:\n" + "".join(log))
    return process


@pytest.fixture
def driver(cluster: str) -> Iterator[Program]:
    """Start the executor's program on the first node."""
    before = ["ip", "netns", "exec", FIRST]
    program = Program(SUPPORT / "ray_driver.py", str(folder("llama")), before=before, RAY_ADDRESS=cluster, **TOKEN)
    yield program
    program.process.kill()
    program.end()


def test_nodes_with_addresses_of_their_own_answer_until_the_cable_is_cut(driver: Program) -> None:
    """The tokens are those of one process, and the error names the rank beyond the cable."""
    report = run(driver)
    assert report["tokens"] == greedy("llama", PROMPT, COUNT)[0]
    ip("-n", SECOND, "link", "set", "cable", "down")
    assert report["names"][1] in driver.heard()["error"]
    assert all_gone(report["pids"], 60.0)
