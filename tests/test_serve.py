"""`penstock serve` as its user runs it: a real process, a real model of a few thousand weights, real signals.

Over several ranks it answers likewise, and whatever is killed, nothing is left.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.export import save_tokenizer

from tests.support.fake_engine import byte_tokenizer
from tests.support.programs import ROOT, Command, all_gone

MODEL: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def served(folder: Path, *options: str, **environment: str) -> Command:
    words = ("serve", folder, "--load-format", "dummy", "--kv-cache-bytes", "8MiB", "--port", "0", *options)
    return Command(*words, max_files=None, TMPDIR=str(folder.parent), **environment)


@pytest.fixture
def server(folder: Path) -> Iterator[Command]:
    with served(folder, "--api-key", "secret") as server:
        yield server


def test_it_prints_its_memory_and_address_answers_and_leaves_nothing(server: Command, folder: Path) -> None:
    url = server.url()
    server.wait_for(r"with the key in .*\n")
    # The byte tokenizer has no chat template: what is printed must be answered nevertheless.
    expected = ".*".join(map(re.escape, Path(__file__).with_suffix(".txt").read_text().split("…")))
    assert re.fullmatch(expected, server.output), server.output
    printed = server.wait_for(r"(?s)Try:\n  (curl .*?)\n")[1]
    environment = os.environ | {"PENSTOCK_API_KEY": "secret"}
    tried = subprocess.run(["bash", "-c", printed], env=environment, capture_output=True, text=True, timeout=60)
    assert tried.returncode == 0 and tried.stdout.rstrip().endswith("data: [DONE]"), tried
    answer = httpx.post(f"{url}/v1/completions", json=BODY, headers={"Authorization": "Bearer secret"}, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert answer.json()["model"] == "tiny"
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 401
    with served(folder, "--port", url.rpartition(":")[2]) as second:
        assert second.process.wait(60) == 2
    assert "Address already in use" in second.output and "Starting" not in second.output, "no model was loaded"
    assert server.stop(signal.SIGTERM) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_server_that_ends_while_the_model_loads_leaves_nothing(
    server: Command, folder: Path, number: signal.Signals
) -> None:
    # The engine core says "Loading", and does not listen until all is loaded.
    server.wait_for("Loading" if number == signal.SIGKILL else "Starting tiny")
    assert server.stop(number) == (-number if number == signal.SIGKILL else 0)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


# Python imports this before the program. In the engine core, the memory suffices for two steps.
FULL = """
import sys
if "penstock.core_process" in sys.orig_argv:
    from penstock.executor.models.decoder import Decoder
    import torch
    forward, steps = Decoder.forward, iter(range(2))
    def full(*inputs):
        if next(steps, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*inputs)
    Decoder.forward = full
"""


@pytest.mark.slow
def test_memory_that_runs_out_in_a_step_ends_the_server_with_what_to_lower(folder: Path, tmp_path: Path) -> None:
    """Whatever has started the server starts it again; clients and the log learn why it was."""
    (tmp_path / "sitecustomize.py").write_text(FULL)
    with served(folder, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT / "src"), *sys.path])) as server:
        answer = httpx.post(f"{server.url()}/v1/completions", json=BODY, timeout=60)
        assert server.process.wait(60) == 1
    options = "lower gpu_memory_utilization, kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
    error = f"the GPU's memory does not suffice for a step: {options}. CUDA out of memory. Tried to allocate 2.00 GiB"
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, error)
    assert f"the engine has failed: {error}\n" in server.output and "Traceback" not in server.output


@pytest.fixture
def two_ranks(folder: Path) -> Iterator[Command]:
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
def test_two_ranks_answer_like_one_and_stop_in_order(two_ranks: Command, folder: Path) -> None:
    url = two_ranks.url()
    ours = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    pids = family(two_ranks)
    assert len(pids) == 3
    assert two_ranks.stop(signal.SIGTERM) == 0
    assert all_gone(pids)
    with served(folder) as alone:
        url = alone.url()
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"] == ours


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
def test_a_killed_worker_ends_the_server_with_its_name_and_a_code(two_ranks: Command, is_idle: bool) -> None:
    url = two_ranks.url()
    pids = family(two_ranks)
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
    assert two_ranks.process.wait(300) != 0
    two_ranks.close()
    assert "rank 1" in two_ranks.output and "was killed by SIGKILL" in two_ranks.output, two_ranks.output
    assert all_gone(pids)


def test_ranks_that_still_import_torch_do_not_outlive_a_killed_server(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, time\nos.write(1, b'importing %d\\n' % os.getpid())\ntime.sleep(600)\n"  # whole, in one line
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), *sys.path])
    with served(folder, "--tensor-parallel-size", "2", PYTHONPATH=path) as server:
        server.wait_for(r"(?s)importing \d+\n.*importing \d+\n")
        pids = [*family(server), *map(int, re.findall(r"importing (\d+)", server.output))]
        assert len(pids) == 5
        server.process.kill()
        assert all_gone(pids)
