"""Weights from a trainer over TCP: once to each machine, whole or not at all, and only to those who know the address."""

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.executor import served_tensors
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import WeightsError
from penstock.executor.served_tensors import ServedTensors, TrainerAddress, fetched
from penstock.executor.shared_tensors import SharedTensors
from tests.executor.test_multiproc import config_of, running
from tests.executor.test_updates import changed, named, said, saved, single
from tests.support.small_models import folder

TENSORS = {"first": torch.arange(100_000.0), "second": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if "forked_ranks" in request.fixturenames:  # whose server stays
        request.getfixturevalue("forked_ranks")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    names = " ".join(thread.name for thread in threading.enumerate())
    assert "serve_forever" not in names and "process_request" not in names and "fetched weights" not in names


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_engine_takes_what_a_trainer_serves_as_it_takes_shared_memory(host: str) -> None:
    other, executor = changed(named("llama")), single(folder("llama"))
    first, info = said(executor), executor.info
    with SharedTensors(other) as shared:
        executor.update_weights(shared.path)
    expected, updated = said(executor), executor.info
    executor.update_weights(str(folder("llama")))
    assert executor.info == info and said(executor) == first
    with ServedTensors(other, host) as served:
        executor.update_weights(served.path)
        assert executor.info == updated and said(executor) == expected
        executor.update_weights(served.path)  # as often as it is asked for
    assert executor.info == updated and said(executor) == expected
    with pytest.raises(WeightsError, match="the tensors cannot be fetched: Connection refused"):
        executor.update_weights(served.path)
    spoiled = {**other, "model.norm.weight": other["model.norm.weight"] * torch.nan}
    with ServedTensors(spoiled, host) as served, pytest.raises(WeightsError, match="'model.norm.weight' has numbers"):
        executor.update_weights(served.path)
    assert executor.info == updated and said(executor) == expected


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_of_one_machine_fetch_once(tmp_path: Path) -> None:
    other = changed(named("llama"))
    fresh = single(saved("llama", other, tmp_path / "other"))
    with running(config_of("llama", 2)) as executor, counted(other) as (served, answered):
        first = said(executor)
        executor.update_weights(served.path)
        assert len(answered) == 1
        assert executor.info.fingerprint == fresh.info.fingerprint and said(executor) == said(fresh)
        executor.update_weights(str(folder("llama")))
        with pytest.raises(WeightsError, match=f"{served.path[:-33]}: the tensors cannot be fetched: closed before"):
            executor.update_weights(served.path[:-1] + "x")
        assert said(executor) == first


@contextmanager
def counted(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[ServedTensors, list[Any]]]:
    answered: list[Any] = []
    with ServedTensors(tensors) as served:
        answer = served._answer

        def count(connection: socket.socket) -> None:
            answered.append(connection)
            answer(connection)

        served._answer = count  # type: ignore[method-assign]
        yield served, answered


class ThreadGroup:
    """Ranks as threads of one process."""

    def __init__(self, world: int) -> None:
        self._values, self._barrier = [0] * world, Barrier(world, timeout=20)

    def rank(self, rank: int) -> RankGroup:
        group = RankGroup(rank, len(self._values), lambda _name: None)  # type: ignore[arg-type,return-value]
        group.minimum = lambda value: self._minimum(rank, value)  # type: ignore[method-assign]
        return group

    def _minimum(self, rank: int, value: int) -> int:
        self._values[rank] = value
        self._barrier.wait()
        least = min(self._values)
        self._barrier.wait()
        return least


def fetched_by(source: str, machines: list[int]) -> list[dict[str, torch.Tensor] | WeightsError]:
    """What each rank finds, a rank for each of the numbers of machines."""
    group, found = ThreadGroup(len(machines)), dict[int, Any]()

    def fetch(rank: int) -> None:
        try:
            with fetched(source, group.rank(rank), machines[rank]) as path:
                found[rank] = load_file(path)
        except WeightsError as error:
            found[rank] = error

    threads = [Thread(target=fetch, args=[rank]) for rank in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(machines))]


def test_every_machine_fetches_once_and_all_ranks_read_the_same() -> None:
    with counted(TENSORS) as (served, answered):
        for found in fetched_by(served.path, [7, 5, 7, 5, 7]):
            assert isinstance(found, dict) and found.keys() == TENSORS.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert len(answered) == 2


def test_a_machine_whose_rank_could_not_fetch_says_so_on_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tensors, "available_memory", lambda: 1000)
    with ServedTensors(TENSORS) as served:
        whole, short = fetched_by(served.path, [3, 3])
    assert "bytes of tensors; this machine has 1000 bytes of memory free" in str(whole)
    assert (
        str(short) == f"tcp://127.0.0.1:{served.path.split(':')[2][:-33]}: rank 0, on this machine, could not fetch it"
    )


@pytest.mark.parametrize(
    "path",
    ["tcp://", "tcp://host", "tcp://host:1", "tcp://host:70000/" + "a" * 32, "tcp://host:0/" + "a" * 32,
     "tcp://host:1/abc", "tcp://:1/" + "a" * 32, "tcp://[::1/" + "a" * 32, "tcp://host:1/" + "ä" * 31],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_before_anything_is_asked(path: str) -> None:
    with pytest.raises(WeightsError, match="an address is tcp://HOST:PORT/SECRET"), fetched(path, RankGroup()):
        pass


def _closes(_connection: socket.socket) -> None:
    """At once."""


def _is_cut_short(connection: socket.socket) -> None:
    connection.sendall((1000).to_bytes(8, "little") + b"x" * 400)


def _sends_nothing(connection: socket.socket) -> None:
    connection.sendall((0).to_bytes(8, "little"))


def _sends_too_much(connection: socket.socket) -> None:
    connection.sendall((2**64 - 1).to_bytes(8, "little"))


def _sends_rubbish(connection: socket.socket) -> None:
    connection.sendall((1000).to_bytes(8, "little") + b"x" * 1000)


def _falls_silent(connection: socket.socket) -> None:
    connection.sendall((1000).to_bytes(8, "little") + b"x" * 400)
    assert connection.recv(1) == b""  # until the other gives up


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (_closes, "closed before its answer: the secret is another one, or the trainer is gone"),
        (_is_cut_short, "cannot be fetched: closed after 400 of 1000 bytes"),
        (_sends_nothing, ": 0 bytes of tensors; this machine has"),
        (_sends_too_much, "18446744073709551615 bytes of tensors; this machine has"),
        (_sends_rubbish, "not a whole safetensors file"),
        (_falls_silent, "cannot be fetched: timed out"),
    ],
)
def test_a_trainer_that_misbehaves_is_named_and_the_old_weights_serve(
    behave: Callable[[socket.socket], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_tensors, "SILENCE_S", 0.3)
    executor = single(folder("llama"))
    first, info = said(executor), executor.info
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(32)
                behave(connection)

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(WeightsError, match=message):
            executor.update_weights(f"tcp://127.0.0.1:{listener.getsockname()[1]}/{'a' * 32}")
        thread.join()
    assert executor.info == info and said(executor) == first


def test_those_who_do_not_know_the_secret_or_say_nothing_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_tensors, "SILENCE_S", 0.2)
    with ServedTensors(TENSORS) as served:
        address = TrainerAddress.read(served.path)
        for said_first in (b"a" * 32, b"GET / HTTP/1.1\r\n\r\n", b"", address.secret.encode()[:-1]):
            with socket.create_connection((address.host, address.port)) as connection:
                connection.settimeout(5)
                connection.sendall(said_first)
                assert connection.recv(1) == b""
        assert str(address) == f"tcp://127.0.0.1:{address.port}" and address.secret not in repr(str(address))


TRAINER = """
import sys, torch
from penstock.executor.served_tensors import ServedTensors
with ServedTensors({"a": torch.zeros(2**24)}) as served:
    print(served.path, flush=True)
    sys.stdin.read()
"""


def test_a_trainer_that_is_killed_while_it_sends_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdin=-1, stdout=-1, text=True) as trainer:
        assert trainer.stdout is not None
        path = trainer.stdout.readline().strip()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served_tensors, "PIECE_BYTES", 2**12)

            class Reader(socket.socket):
                def recv_into(self, *given: Any) -> int:
                    trainer.kill()
                    trainer.wait()
                    return super().recv_into(*given)

            patch.setattr(socket, "socket", Reader)
            with pytest.raises(WeightsError, match="tensors cannot be fetched: "), fetched(path, RankGroup()):
                pass


def test_tensors_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(WeightsError, match="tensor 'counts' is of int64; one of float32"):
        ServedTensors({**TENSORS, "counts": torch.ones(2, dtype=torch.int64)})


def test_a_port_that_is_taken_and_a_host_that_is_not_ours_leave_nothing() -> None:
    with ServedTensors(TENSORS) as served:
        port = TrainerAddress.read(served.path).port
        with pytest.raises(OSError):
            ServedTensors(TENSORS, port=port)
    with pytest.raises(OSError):
        ServedTensors(TENSORS, "192.0.2.1")
