"""`penstock serve` over several ranks, as its user runs it: it answers, and whatever is killed, nothing is left."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.programs import ROOT, Command, all_gone
from tests.test_serve import folder, served  # noqa: F401

pytestmark = pytest.mark.timeout(400)  # each of these imports torch three times, and does so on any machine

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(folder: Path) -> Iterator[Command]:  # noqa: F811
    with served(folder, "--tensor-parallel-size", "2") as server:
        yield server


def children(pid: int) -> list[int]:
    """Return child processes in the order of their start. The kernel's own list needs CONFIG_PROC_CHILDREN."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found[int(path.parent.name)] = int(fields[19])
    return sorted(found, key=lambda child: (found[child], child))


def family(server: Command) -> list[int]:
    """Return the processes of the core and its workers."""
    (core,) = children(server.process.pid)
    return [core, *children(core)]


@pytest.mark.slow
def test_two_ranks_answer_like_one_and_stop_in_order(server: Command, folder: Path) -> None:  # noqa: F811
    url = server.url()
    ours = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    pids = family(server)
    assert len(pids) == 3
    assert server.stop(signal.SIGTERM) == 0
    assert all_gone(pids)
    with served(folder) as alone:
        url = alone.url()
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"] == ours


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
def test_a_killed_worker_ends_the_server_with_its_name_and_a_code(server: Command, is_idle: bool) -> None:
    url = server.url()
    pids = family(server)
    if is_idle:
        os.kill(pids[2], signal.SIGKILL)
    else:
        long = {**BODY, "max_tokens": 30_000, "stream": True}  # half a minute on an idle machine: it is cut short
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(pids[2], signal.SIGKILL)
            rest = "".join(lines)
        assert "rank 1" in rest and "SIGKILL" in rest and '"error"' in rest, rest[-2000:]
    assert server.process.wait(300) != 0
    server.close()
    assert "rank 1" in server.output and "was killed by SIGKILL" in server.output, server.output
    assert all_gone(pids)


@pytest.mark.slow
def test_nothing_outlives_a_killed_server(server: Command) -> None:
    server.url()
    pids = family(server)
    server.process.kill()
    assert all_gone(pids)


def test_ranks_that_still_import_torch_do_not_outlive_a_killed_server(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "torch.py").write_text(
        "import os, time\nprint('importing', os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), *sys.path])
    with served(folder, "--tensor-parallel-size", "2", PYTHONPATH=path) as server:
        server.wait_for("(?s)importing.*importing")
        pids = [*family(server), *map(int, re.findall(r"importing (\d+)", server.output))]
        assert len(pids) == 5
        server.process.kill()
        assert all_gone(pids)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_heads_are_refused_before_the_server_is_up(folder: Path) -> None:  # noqa: F811
    with served(folder, "--tensor-parallel-size", "3") as server:
        assert server.process.wait(200) != 0
    assert "tensor_parallel_size: 3 given; it must divide the model's 4 attention heads" in server.output
    assert "Traceback" not in server.output
