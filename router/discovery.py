"""Finds replicas in sources other than the command line: `--discover`, which may be repeated.

    file:PATH          one replica a line, written as for --backend; read again when it changes
    dns:HOST:PORT      every address of the name, such as that of a headless Service in Kubernetes

The words of --backend may follow a DNS name (`,events=5557,replay=5558`); they apply to each replica that is found. A
source that cannot be read changes nothing: the known replicas stay, and the probes show which of them are alive.
"""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from penstock.engine.http.errors import HttpError
from penstock.router.backend import Backend, RouteError
from penstock.router.background import Tasks

log = logging.getLogger("penstock.router")

LOOK_S = 1.0  # between two looks at a file …
ASK_S = 5.0  # … or at a name; and before a source that failed is read again

SOURCE = re.compile(r"file:(?P<path>.+)|dns:(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})(?P<words>,.+)?")


def check_source(text: str) -> re.Match[str]:
    """Parse a source; raise RouteError if it is not one, or if its words are not those of a replica."""
    found = SOURCE.fullmatch(text)
    if found is None:
        hint = "; dns: with a headless Service covers Kubernetes" if text.startswith(("k8s:", "srv:")) else ""
        raise RouteError(f"discover: {text[:120]!r}; file:PATH or dns:HOST:PORT is expected{hint}")
    Backend.of(f"http://h:{found['port'] or 1}{found['words'] or ''}", "discover")  # the lines of a file have their own
    return found


class Discovery:
    """Keeps the fleet in line with its sources. `apply` adds ("POST") or removes ("DELETE") a replica. Replicas that were
    not added here are left alone."""

    def __init__(self, sources: tuple[str, ...], apply: Callable[[str, Backend], None], tasks: Tasks) -> None:
        self._sources = sources
        self._apply = apply
        self._tasks = tasks
        self._listed: dict[str, dict[str, str]] = {source: {} for source in sources}  # URL → the replica as written
        self._added: set[str] = set()  # URLs that were added here

    def start(self) -> None:
        for source in self._sources:
            self._tasks.keep_running(f"discovery by {source}", partial(self._follow, source))

    async def _follow(self, source: str) -> None:
        last_error = ""
        while True:
            try:
                async with contextlib.aclosing(states(source)) as lists:
                    async for texts in lists:
                        self._take(source, texts)
                        last_error = ""
            except (OSError, ValueError, LookupError, TypeError) as error:  # or the source has another form
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("discover: %s: %s; the replicas that are known stay", source, last_error or "no answer")
                await asyncio.sleep(ASK_S)

    def _take(self, source: str, texts: list[str]) -> None:
        new = {Backend.of(text, "discover").url: text for text in texts}
        old = self._listed[source]
        others = {url for name, listed in self._listed.items() if name != source for url in listed}
        self._listed[source] = new
        for url in (old.keys() | new.keys()) - others:
            if old.get(url) == new.get(url):
                continue
            if url in self._added:
                self._added.remove(url)
                self._change("DELETE", url)
            if url in new and self._change("POST", new[url]):
                self._added.add(url)

    def _change(self, method: str, text: str) -> bool:
        try:
            self._apply(method, Backend.of(text, "discover"))
        except (HttpError, RouteError) as error:  # added by the operator too, or its key is not set
            log.warning("discover: %s: %s", text, error)
            return False
        return True


async def states(source: str) -> AsyncGenerator[list[str], None]:
    """Yield all replicas of a source, whenever they may have changed."""
    found = check_source(source)
    if found["path"]:
        read: str | None = None
        before = read
        while True:
            text = await asyncio.to_thread(Path(found["path"]).read_text)
            if text != read and (text == before or read is None):  # the same twice: it is not being written
                read = text
                lines = [line.strip() for line in text.splitlines()]
                yield [line for line in lines if line and not line.startswith("#")]
            before = text
            await asyncio.sleep(LOOK_S)
    else:
        while True:
            hosts = sorted({f"[{each}]" if ":" in each else each for each in await _addresses(found["host"])})
            yield [f"http://{host}:{int(found['port'])}{found['words'] or ''}" for host in hosts]
            await asyncio.sleep(ASK_S)


async def _addresses(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
