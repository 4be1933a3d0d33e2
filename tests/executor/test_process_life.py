"""How processes of ours live: what passes between parent and child, how each ends, and what signals do."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from penstock.executor.process_life import (
    STOP_SIGNALS,
    Channels,
    ChildProcess,
    Reporter,
    Stopping,
    begin,
    receive,
    send,
    start_child,
    stop_signals,
    wait_for,
)
from penstock.prove.own.server import DIE_WITH, PENSTOCK
from tests.support.programs import Program, all_gone

HALF = "half a message"
SLOW_IMPORT = "import os, time\nprint('importing', os.getpid(), flush=True)\ntime.sleep(600)\n"


class Order(msgspec.Struct, tag="order"):
    text: str
    exit_code: int = 0


def main() -> int:
    """Report how long the start was, and the order; then wait, or end with its code. The order HALF stops in a message."""
    start, channel = begin(Order)
    reporter = Reporter(partial(send, channel))
    reporter.report(Order(str(len(start.text))))
    message = receive(channel)
    assert message is not None
    order = msgspec.msgpack.decode(message, type=Order)
    if order.text == HALF:
        os.write(channel.fileno(), struct.pack("!i", 1 << 20) + b"the first bytes")
        time.sleep(100)
    reporter.report(order)
    if order.exit_code:
        return order.exit_code
    reporter.beat(lambda: Order("alive"))
    time.sleep(100)
    return 0


@contextlib.contextmanager
def running(text: str, order: Order) -> Iterator[tuple[ChildProcess, Iterator[str | None]]]:
    """Start a child with its start and its order; yield it and its reports."""
    child = start_child("tests.executor.test_process_life", "the child", Order(text))
    send(child.channel, order)
    channels = Channels(msgspec.msgpack.Decoder(Order))
    channels.add(7, child.channel)

    def reports() -> Iterator[str | None]:
        while True:
            for index, message in channels.receive():
                assert index == 7
                yield None if message is None else message.text

    try:
        yield child, reports()
    finally:
        child.kill()
        child.wait(60)
        channels.close()


def test_a_child_that_stops_within_a_message_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.process_life.STALL_S", 1)
    with running("x", Order(HALF)) as (child, reports):
        with pytest.raises(BlockingIOError):
            while True:
                send(child.channel, Order("x" * 10_000))
        assert [next(reports), next(reports)] == ["1", None]


def test_a_start_of_any_size_arrives_whole_and_what_follows_it_is_not_lost() -> None:
    with running("x" * 1_000_000, Order("at once", exit_code=3)) as (child, reports):
        assert [next(reports), next(reports), next(reports)] == ["1000000", "at once", None]
        assert child.wait(60)
        assert child.death() == "ended with code 3"
        assert child.name == f"the child (process {child.pid})"


def test_children_do_not_import_files_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with running("x", Order("")) as (_, reports):
        assert next(reports) == "1"
    subprocess.run([*DIE_WITH, str(os.getpid()), *PENSTOCK, "--version"], check=True)


@pytest.mark.parametrize("kind", ["a child", "a child of another thread", "a command"])
def test_a_child_that_is_still_imported_dies_with_its_parent(kind: str, tmp_path: Path) -> None:
    """Only the main thread lives as long as its process, so the kernel's tie does not serve for another one."""
    (tmp_path / "slow.py").write_text(SLOW_IMPORT)
    start = 'start_child("slow", "the child", msgspec.defstruct("Start", [])())'
    if kind == "a command":
        start = f"subprocess.Popen([*DIE_WITH, str(os.getpid()), sys.executable, {str(tmp_path / 'slow.py')!r}])"
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, subprocess, sys, threading, time\n"
        "import msgspec\n"
        "from penstock.executor.process_life import start_child\n"
        "from penstock.prove.own.server import DIE_WITH\n"
        f"work = lambda: ({start}, time.sleep(600))\n"
        f"{'threading.Thread(target=work).start()' if 'thread' in kind else 'work()'}\n"
    )
    parent = Program(script, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    pid = int(parent.line("importing").split()[1])
    parent.process.kill()
    parent.end()
    assert all_gone([pid])


def test_a_child_ignores_signals_to_stop_and_ends_with_its_channel() -> None:
    with running("", Order("stay")) as (child, reports):
        assert [next(reports), next(reports), next(reports)] == ["0", "stay", "alive"]
        for number in STOP_SIGNALS:
            os.kill(child.pid, number)
        assert next(reports) == "alive"
        assert child.death() is None
        with socket.socket(fileno=os.dup(child.channel.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)
        assert child.wait(60)


def test_without_a_loop_signals_are_counted_and_their_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    came: list[None] = []
    with stop_signals(lambda: came.append(None)):
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    assert len(came) == 2
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


async def test_on_a_loop_the_first_signal_drains_and_the_second_does_not_wait() -> None:
    stopping = Stopping()
    with stop_signals(stopping.take, (signal.SIGTERM,)):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await stopping.drain.wait()
        await wait_for(lambda: False, stopping.stop, 0.01)
        assert not stopping.stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_for(lambda: False, stopping.stop, 60)
        assert stopping.stop.is_set()


if __name__ == "__main__":
    sys.exit(main())
