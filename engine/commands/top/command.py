"""`penstock top URL`: the live view of a server or a router in a terminal.

Asks what the page in a browser asks: /metrics, and of a router /replicas. To anything but a terminal it prints one
view and ends. A terminal gets its own screen back at the end, however that comes.
"""

import argparse
import asyncio
import contextlib
import errno
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec

from penstock.engine.commands.bench.http_client import Client, Target
from penstock.engine.commands.bench.startup import END_SIGNALS
from penstock.engine.commands.top.figures import History, Look
from penstock.engine.commands.top.screen import Line, Span, clean, router_lines, server_lines
from penstock.engine.config import ConfigError
from penstock.executor.process_life import stop_signals

TIMEOUT_S = 5.0
KEYS = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of our own, without a cursor
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
STYLES = {"soft": "\x1b[2m", "strong": "\x1b[1m", "accent": "\x1b[36m", "alarm": "\x1b[31m"}
PLAIN = "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of a server or router (%(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="print one view, as to anything but a terminal")
    parser.epilog = f"The API key is read from {' or '.join(KEYS)}. NO_COLOR is respected. q or Ctrl-C ends it."


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 60:
        raise ConfigError(f"interval: {args.interval} is out of range, 0.1 to 60 seconds")
    try:
        target = Target.of(args.url)
    except ValueError as error:
        raise ConfigError(f"url: {error}") from None
    server = Watched(args.url, target, os.environ)
    show = _once if args.once or not sys.stdout.isatty() else _watch
    try:
        asyncio.run(show(server, args.interval, sys.stdout))
        sys.stdout.flush()
    except OSError as error:  # the reader has seen enough, or the terminal is gone
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not be written either
    return 0


class Watched:
    """A server or a router, and what it said in the last minute."""

    def __init__(self, url: str, target: Target, environment: Mapping[str, str]) -> None:
        self.url = url
        self.history = History()
        self.replicas: Sequence[Mapping[str, Any]] | None = None  # of a router
        self._client = Client(target)
        key = next((environment[name] for name in KEYS if environment.get(name)), None)
        self._headers = {} if not key else {"Authorization": f"Bearer {key}"}

    async def look(self) -> None:
        """Raises ConfigError, with a line to show, when there is no answer that can be read."""
        text = (await self._get("/metrics")).decode(errors="replace")
        try:
            look = Look.of(text, time.monotonic())
        except ValueError:
            raise ConfigError(f"url: {self.url}/metrics is not in the format of Prometheus") from None
        if "penstock:router_under_way" in text:
            self.replicas = msgspec.json.decode(await self._get("/replicas"))["replicas"]
        self.history.add(look)

    def lines(self) -> Iterator[Line]:
        yield [Span("Penstock  ", "strong"), Span(clean(self.url)), Span(f"  {self._what()}", "soft")]
        yield []
        if self.replicas is None:
            yield from server_lines(self.history)
        else:
            yield from router_lines(self.history, self.replicas)

    def close(self) -> None:
        self._client.close()

    async def _get(self, path: str) -> bytes:
        request = self._client.fetch("GET", path, headers=self._headers)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await request
        except TimeoutError:
            raise ConfigError(f"url: {self.url}{path} did not answer within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConfigError(f"url: {self.url} is not reachable: {error}") from None
        if status == 401:
            raise ConfigError(f"url: {self.url} wants an API key, and {' or '.join(KEYS)} has not the right one")
        if status != 200:
            raise ConfigError(f"url: {self.url}{path} answered {status}")
        return body

    def _what(self) -> str:
        if self.replicas is not None:
            num_open = sum(bool(replica["is_available"]) for replica in self.replicas)
            return f"{num_open} of {len(self.replicas)} replicas take requests"
        names = self.history.now.by_label("vllm:num_requests_running", "model_name")
        return clean(", ".join(names) or "a server without vLLM's names")


async def _once(server: Watched, interval_s: float, out: TextIO) -> None:
    """Two looks, for rates need two."""
    await server.look()
    await asyncio.sleep(interval_s)
    await server.look()
    server.close()
    for line in server.lines():
        print("".join(piece.text for piece in line).rstrip(), file=out)


async def _watch(server: Watched, interval_s: float, out: TextIO) -> None:
    """Until the user ends it. A server that was never there is an error; one that goes away is waited for."""
    task = asyncio.current_task()
    assert task is not None
    with (
        stop_signals(task.cancel, END_SIGNALS),
        contextlib.suppress(asyncio.CancelledError),
        _own_screen(out),
        _keys(lambda key: task.cancel() if key in "qQ" else None),
    ):
        await server.look()
        trouble = ""
        while True:
            lines = list(server.lines())
            if trouble:
                lines[1] = [Span(trouble, "alarm")]
            out.write(frame(lines, *shutil.get_terminal_size(), has_colour="NO_COLOR" not in os.environ))
            out.flush()
            await asyncio.sleep(interval_s)
            try:
                await server.look()
                trouble = ""
            except ConfigError as error:
                trouble = clean(error)
    server.close()


@contextlib.contextmanager
def _keys(pressed: Callable[[str], object]) -> Iterator[None]:
    """Keys as they are pressed, without a line's end and without showing them; nothing where the input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: pressed(os.read(number, 1).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def frame(lines: Sequence[Line], width: int, height: int, *, has_colour: bool) -> str:
    """One screenful over the one before: no line is longer than the screen is wide, and none is left of the old."""
    shown = []
    for line in lines[: height - 1]:
        room, text = width, ""
        for piece in line:
            cut = piece.text[:room]
            room -= len(cut)
            text += f"{STYLES[piece.style]}{cut}{PLAIN}" if has_colour and piece.style and cut else cut
        shown.append(text + TO_LINE_END)
    return HOME + "\r\n".join(shown) + TO_SCREEN_END


@contextlib.contextmanager
def _own_screen(out: TextIO) -> Iterator[None]:
    out.write(ENTER)
    out.flush()
    try:
        yield
    finally:
        out.write(LEAVE)
        out.flush()
