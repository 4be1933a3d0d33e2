"""Where replicas are, from elsewhere than the command line: `--discover`, which may be repeated.

    file:PATH                              a replica a line, as behind --backend; read again when it changes
    dns:HOST:PORT                          every address of the name
    srv:_http._tcp.NAME                    every host and port of its SRV records
    k8s:NAMESPACE/SERVICE[:PORT]           the ready endpoints of a service, by name or number of a port

Behind any but a file the words of --backend may stand (`,events=5557,replay=5558`), for each replica that is found.
A source that cannot be read changes nothing: who was there stays, and the probes say who is alive.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from penstock.engine.http.errors import HttpError
from penstock.router.backend import Backend, RouteError
from penstock.router.background import keep_running
from penstock.router.http.upstream import Dechunker

log = logging.getLogger("penstock.router")

LOOK_S = 1.0  # between two looks at a file …
ASK_S = 5.0  # … or at a name; and before a server that failed is asked again
ANSWER_S = 5.0
WATCH_S = 300  # for so long the API server is asked to say what changes, before all of it is read again
MOUNTED = "/var/run/secrets/kubernetes.io/serviceaccount"

SOURCE = re.compile(
    r"file:(?P<path>.+)"
    r"|dns:(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})(?P<dns_words>,.+)?"
    r"|srv:(?P<name>[A-Za-z0-9._-]+)(?P<srv_words>,.+)?"
    r"|k8s:(?P<namespace>[a-z0-9-]+)/(?P<service>[a-z0-9.-]+)(?::(?P<k8s_port>[a-z0-9-]+))?(?P<k8s_words>,.+)?"
)


class SourceError(ValueError):
    """A source cannot be read now; the message says why."""


def check_source(text: str) -> re.Match[str]:
    """Raises RouteError."""
    found = SOURCE.fullmatch(text)
    if found is None:
        raise RouteError(
            f"discover: {text[:120]!r}; file:PATH, dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE[:PORT] is expected"
        )
    return found


def discovered_like(source: str) -> Backend:
    """Return a replica with the words that the source gives each replica it finds. The lines of a file have their own."""
    found = check_source(source)
    words = next((found[name] for name in ("dns_words", "srv_words", "k8s_words") if found[name]), "")
    return Backend.of(f"http://h:{found['port'] or 1}{words}", "discover")


class Discovery:
    """Keeps the fleet in line with its sources. `apply` adds ("POST") or takes out ("DELETE") a replica; what others have
    added is left alone."""

    def __init__(self, sources: tuple[str, ...], apply: Callable[[str, str], None]) -> None:
        self._sources = sources
        self._apply = apply
        self._found: dict[str, dict[str, str]] = {source: {} for source in sources}  # by URL: how it is written
        self._added: set[str] = set()  # of their URLs, those that were not there before
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.get_running_loop().create_task(self._keep_following(each)) for each in self._sources]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_following(self, source: str) -> None:
        await keep_running(f"discovery by {source}", lambda: self._follow(source))

    async def _follow(self, source: str) -> None:
        said = ""
        while True:
            try:
                async with contextlib.aclosing(states(source)) as found:
                    async for texts in found:
                        self._take(source, texts)
                        said = ""
            except (OSError, ValueError, LookupError, TypeError) as error:  # or what it says has another form
                if str(error) != said:
                    said = str(error)
                    log.warning("discover: %s: %s; the replicas that are known stay", source, said or "no answer")
                await asyncio.sleep(ASK_S)

    def _take(self, source: str, texts: list[str]) -> None:
        new = {Backend.of(text, "discover").url: text for text in texts}
        old = self._found[source]
        others = {url for name, found in self._found.items() if name != source for url in found}
        self._found[source] = new
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
            self._apply(method, text)
        except (HttpError, RouteError) as error:  # the operator has named it too, or its key is not set
            log.warning("discover: %s: %s", text, error)
            return False
        return True


async def states(source: str) -> AsyncGenerator[list[str], None]:
    """All replicas of a source, each time that they may have changed."""
    found = check_source(source)
    if found["path"]:
        read: tuple[int, int] | None = None
        before = read
        while True:
            status = await asyncio.to_thread(os.stat, found["path"])
            seen = status.st_mtime_ns, status.st_size
            if seen != read and (seen == before or read is None):  # the same twice: it is not being written
                read = seen
                text = await asyncio.to_thread(Path(found["path"]).read_text)
                lines = [line.strip() for line in text.splitlines()]
                yield [line for line in lines if line and not line.startswith("#")]
            before = seen
            await asyncio.sleep(LOOK_S)
    elif found["service"]:
        async with contextlib.aclosing(endpoints(found["namespace"], found["service"], found["k8s_port"])) as states:
            async for addresses in states:
                yield [f"http://{address}{found['k8s_words'] or ''}" for address in addresses]
    else:
        while True:
            if found["host"]:
                addresses = [_written(each, int(found["port"])) for each in await _addresses(found["host"])]
            else:
                addresses = [f"{host}:{port}" for host, port in await ask_srv(found["name"])]
            words = found["dns_words"] or found["srv_words"] or ""
            yield [f"http://{address}{words}" for address in sorted(set(addresses))]
            await asyncio.sleep(ASK_S)


async def _addresses(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def _written(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# -- DNS: what the system's resolver does not say ------------------------------------------------------------------


class _Question(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, _address: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(data)

    def error_received(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _nameserver() -> tuple[str, int]:
    for line in Path("/etc/resolv.conf").read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            return words[1], 53
    raise SourceError("/etc/resolv.conf names no nameserver")


async def ask_srv(name: str, server: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """Hosts and ports of the SRV records with the lowest priority number. The name is taken as it is, without a search
    list."""
    number = secrets.randbelow(1 << 16)
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split("."))
    question = struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 33, 1)
    loop = asyncio.get_running_loop()
    transport, asked = await loop.create_datagram_endpoint(_Question, remote_addr=server or _nameserver())
    try:
        transport.sendto(question)
        async with asyncio.timeout(ANSWER_S):
            answer = await asked.answer
        return _srv_records(answer, number)
    except (struct.error, IndexError):
        raise SourceError(f"the nameserver's answer about {name} is not understood") from None
    finally:
        transport.close()


def _srv_records(answer: bytes, number: int) -> list[tuple[str, int]]:
    got, flags, num_questions, num_answers = struct.unpack_from(">HHHH", answer)
    if got != number or flags & 0xF or flags & 0x0200:
        raise SourceError("the nameserver knows no such name, or its answer is too long for a datagram")
    at = 12
    for _ in range(num_questions):
        at = _name(answer, at)[1] + 4
    found: list[tuple[int, str, int]] = []
    for _ in range(num_answers):
        at = _name(answer, at)[1]
        kind, _, _, size = struct.unpack_from(">HHIH", answer, at)
        at += 10
        if kind == 33:
            priority, _, port = struct.unpack_from(">HHH", answer, at)
            found.append((priority, _name(answer, at + 6)[0], port))
        at += size
    return [(host, port) for priority, host, port in found if priority == min(found)[0]]


def _name(answer: bytes, at: int) -> tuple[str, int]:
    """A name and where it ends; it may go on elsewhere in the message."""
    labels, end, jumps = [], 0, 0
    while answer[at]:
        if answer[at] >= 0xC0:
            end, jumps = end or at + 2, jumps + 1
            if jumps > 16:
                raise SourceError("the nameserver's answer goes round in circles")
            at = struct.unpack_from(">H", answer, at)[0] & 0x3FFF
            continue
        labels.append(answer[at + 1 : at + 1 + answer[at]].decode("latin-1"))
        at += 1 + answer[at]
    return ".".join(labels), end or at + 1


# -- Kubernetes ----------------------------------------------------------------------------------------------------


async def endpoints(namespace: str, service: str, port: str | None) -> AsyncGenerator[list[str], None]:
    """Of a service, host:port of its ready endpoints: now, and whenever a watch says that something has changed."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
    while True:
        slices = json.loads(b"".join([line async for line in _ask(path)]))
        yield sorted({address for each in slices["items"] for address in _ready(each, port)})
        version = slices["metadata"]["resourceVersion"]
        watch = f"{path}&watch=1&resourceVersion={version}&timeoutSeconds={WATCH_S}"
        async with contextlib.aclosing(_ask(watch, WATCH_S + ANSWER_S)) as changes:
            async for line in changes:
                if json.loads(line)["type"] != "BOOKMARK":
                    break  # all of it is read again: a slice is a part, and this is simple
        await asyncio.sleep(LOOK_S)  # changes come in groups, and a watch may end at once


def _ready(piece: dict[str, Any], wanted: str | None) -> list[str]:
    ports = [
        each["port"]
        for each in piece.get("ports") or ()
        if each.get("port") and wanted in (None, each.get("name"), str(each["port"]))
    ]
    return [
        _written(address, ports[0])
        for endpoint in piece.get("endpoints") or ()
        if ports and (endpoint.get("conditions") or {}).get("ready") is not False
        for address in endpoint["addresses"]
        if _is_address(address)
    ]


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


async def _ask(path: str, patience_s: float = ANSWER_S) -> AsyncGenerator[bytes, None]:
    """Lines of the API server's answer as they come. In a pod its address is in the environment, token and authority
    in a folder; KUBERNETES_API names another, over plain HTTP as `kubectl proxy` offers it."""
    address = os.environ.get("KUBERNETES_API")
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    folder = Path(os.environ.get("KUBERNETES_SERVICE_ACCOUNT", MOUNTED))
    context = None
    if address is not None:
        host, _, given = address.removeprefix("http://").rpartition(":")
        port = int(given)
    else:
        context = await asyncio.to_thread(ssl.create_default_context, cafile=str(folder / "ca.crt"))
    token = folder / "token"
    lines = f"GET {path} HTTP/1.1\r\nhost: {host}\r\naccept: application/json\r\nconnection: close\r\n"
    if await asyncio.to_thread(token.exists):  # read anew each time: tokens are replaced while we run
        lines += f"authorization: Bearer {(await asyncio.to_thread(token.read_text)).strip()}\r\n"
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(lines.encode() + b"\r\n")
        async with asyncio.timeout(ANSWER_S):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not re.match(rb"http/1\.[01] 200", head):
            raise SourceError(f"the API server answers {head.split(b' ', 2)[1].decode('latin-1')[:3]} to {path[:120]}")
        body = Dechunker() if b"transfer-encoding: chunked" in head else None
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        left = int(length[1]) if length is not None else None
        rest = b""
        async with asyncio.timeout(patience_s):
            while left != 0 and not (body and body.is_over) and (data := await reader.read(1 << 16)):
                left = None if left is None else max(left - len(data), 0)
                *whole, rest = (rest + (body.feed(data) if body is not None else data)).split(b"\n")
                for line in whole:
                    yield line
        if rest:
            yield rest
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise SourceError("the API server breaks off") from None
    finally:
        writer.close()
