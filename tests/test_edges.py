"""Keys and limits of the two HTTP servers, the engine's and the router's: each case is asked of both."""

import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.engine.http.auth import OPEN_ROUTES
from penstock.engine.http.hosts import Hosts
from penstock.engine.http.limits import Limits
from penstock.router.routes import OPEN, OWN, PROXIED
from tests.router.test_heads import SMUGGLING
from tests.support.programs import Program
from tests.support.raw_http import clients, connect, exchange, post, read_all, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub
from tests.support.running_server import running, until

KEY, OTHER = "sk-client", "sk-other"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
SMALL = Limits(max_header_bytes=4096, max_body_bytes=10_000, max_connections=20)
HASTY = Limits(header_timeout_s=1.0, body_timeout_s=1.0)


class Edge(NamedTuple):
    port: int
    routes: list[str]
    is_open: Callable[[str, str], bool]
    absent: tuple[str, ...]  # routes whose resource is not there, or was removed
    num_connections: Callable[[], int]
    num_reached: Callable[[], int]  # requests that reached the engine or a replica
    num_open: Callable[[], int]  # requests that have been read and not answered
    is_reading: Callable[[], bool]  # a part of a head has come


@contextlib.contextmanager
def serving(kind: str, keys: Sequence[str] = (), limits: Limits | None = None, **settings: Any) -> Iterator[Edge]:
    limits = limits or Limits()
    if kind == "server":
        fields = {name: getattr(limits, name) for name in Limits.__dataclass_fields__}
        with running(api_keys=tuple(keys), **fields, **settings) as server:
            routes = sorted(path.replace("{model:path}", "tiny") for path in server.app.templates)
            listener = server.listener
            absent = ("/v1/responses/", "/v1/conversations")
            counts = (lambda: len(listener.connections), lambda: server.engine.num_admissions)
            in_loop = (
                partial(server.call, lambda: server.app.service.num_open_requests),
                partial(server.call, lambda: any(each._num_header_bytes for each in listener.connections)),
            )
            yield Edge(server.port, routes, lambda *each: each in OPEN_ROUTES, absent, *counts, *in_loop)
    else:
        with stub() as backend, running_router(backend.url, api_keys=tuple(keys), limits=limits, **settings) as router:
            app = router.app

            def is_open(method: str, path: str) -> bool:
                return (method.encode(), path) in OPEN

            def is_reading() -> bool:
                return not all(each.is_idle for each in app.edge.connections)

            num_open = (lambda: len(app.edge.connections), lambda: len(backend.seen), lambda: len(app.exchanges))
            yield Edge(router.port, sorted(PROXIED | OWN), is_open, (), *num_open, is_reading)


def edges(**settings: Any) -> Any:
    """Return a fixture: both servers, one after the other, with these settings."""

    @pytest.fixture(scope="module", params=["server", "router"])
    def started(request: pytest.FixtureRequest) -> Iterator[Edge]:
        with serving(request.param, **settings) as edge:
            yield edge

    return started


keyed, small, hasty = edges(keys=(KEY, OTHER)), edges(limits=SMALL), edges(limits=HASTY)


def ask(edge: Edge, method: str, target: str, *headers: str, host: str = "localhost") -> int:
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", "connection: close", *headers]
    with connect(edge.port) as sock:
        sock.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
        return status(sock.recv(65536))  # the head: /kv_events never ends


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


WRONG = ("Bearer sk-wrong", "Bearer ", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}-not")


def test_without_a_key_or_with_a_wrong_one_only_the_open_routes_answer(keyed: Edge) -> None:
    assert keyed.is_open("GET", "/health") and keyed.is_open("GET", "/ready")  # the probes of Kubernetes have no key
    for path in keyed.routes:
        for method in METHODS:
            expected = 200 if keyed.is_open(method, path) else 401
            assert ask(keyed, method, path) == expected, (method, path)
        for value in () if keyed.is_open("GET", path) else WRONG:
            assert ask(keyed, "GET", path, f"authorization: {value}") == 401, (path, value)


def test_a_wrong_key_is_refused_before_the_body_and_is_not_repeated(keyed: Edge) -> None:
    num_reached = keyed.num_reached()
    with connect(keyed.port) as sock:
        sock.sendall(post(b"", b"content-length: 1000000", b"authorization: Bearer sk-canary", close=False))
        answer = sock.recv(65536)
    assert status(answer) == 401 and b'"code":401' in answer and b'"type":"authentication_error"' in answer
    assert b"www-authenticate: Bearer\r\n" in answer and b"canary" not in answer
    assert keyed.num_reached() == num_reached


@pytest.mark.parametrize(("headers", "expected"), cases(__file__, "headers with keys", KEY=KEY, OTHER=OTHER))
def test_every_header_with_a_key_has_to_have_an_accepted_one(keyed: Edge, headers: list[str], expected: int) -> None:
    """Anthropic's SDK sends two where both of its variables are set."""
    for ordered in (headers, headers[::-1]):
        assert ask(keyed, "GET", "/v1/models", *ordered) == expected, ordered


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_of_the_keys_opens_every_route(keyed: Edge, key: str) -> None:
    for path in keyed.routes:
        expected = (404, 405, 400) if path.startswith(keyed.absent) else (200, 405)
        assert ask(keyed, "GET", path, f"authorization: bearer {key}") in expected, path


HOSTS = ("localhost", "x/health?", "/health", "x/?", "health", "[::1]/", "x/health#", "")


@pytest.mark.parametrize("target", ["/v1/models", *cases(__file__, "spellings of paths")])
def test_no_spelling_of_a_path_or_host_gets_round_the_key(keyed: Edge, target: str) -> None:
    for method, host in (("GET", "x"), ("POST", "x"), ("OPTIONS", "x"), *(("GET", host) for host in HOSTS)):
        assert ask(keyed, method, target, host=host) in (400, 401), (method, target, host)


# Web pages of other origins: none may ask, unless the operator of the engine's server names them.

PAGE = "https://app.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_only_a_named_origin_may_ask_and_with_its_key() -> None:
    with running() as server:
        assert server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT}).status_code == 405
        answer = server.complete("abc", max_tokens=1)
        assert not any(name.startswith("access-control") for name in answer.headers)
    with running(api_keys=(KEY,), allowed_origins=(PAGE,)) as server:
        preflight = server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        refused = server.http.options("/v1/chat/completions", headers={"Origin": "https://other.example", **PREFLIGHT})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        for headers, expected in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
            answer = server.post("/v1/completions", {"prompt": "abc"}, headers={"Origin": PAGE, **headers})
            assert answer.status_code == expected and answer.headers["access-control-allow-origin"] == PAGE


MALFORMED = SMUGGLING | dict(table(__file__, "malformed requests", post=post))


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_reaches_no_engine(small: Edge, name: str, caplog: pytest.LogCaptureFixture) -> None:
    num_reached = small.num_reached()
    answer = exchange(small.port, MALFORMED[name])
    assert 400 <= status(answer) <= 505 and b'"error":{"message":' in answer and len(statuses(answer)) == 1
    assert small.num_reached() == num_reached and "Fatal error" not in caplog.text


def test_an_offer_of_another_protocol_is_ignored_and_makes_no_request(small: Edge) -> None:
    """Java's own client offers h2c with every request. One that comes in two pieces may be refused, for that reason."""
    body, end = GET + b"\r\n", GET + b"connection: close\r\n\r\n"
    offer = b"connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA"
    head = post(body, *offer, close=False).removesuffix(body)
    cut = head.index(b"Upgrade: h2c") + 4
    assert status(exchange(small.port, post(b'{"prompt":"abc"}', *offer, close=False) + end)) == 200
    for first, rest, num_answers in ((head, body, 2), (head[:cut], head[cut:] + body, 1)):
        with connect(small.port) as sock:
            sock.sendall(first)
            until(small.is_reading)
            sock.sendall(rest)
            answer = sock.recv(65536)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(end)
            answer += read_all(sock)
        assert len(statuses(answer)) == num_answers
        assert num_answers == 2 or (status(answer) == 400 and (b"upgrade" in answer or b"protocol" in answer))


def test_pipelined_requests_are_answered_in_order(small: Edge) -> None:
    metrics = GET.replace(b"/health", b"/metrics") + b"\r\n"
    answer = exchange(small.port, post(close=False) + metrics + post())
    assert statuses(answer) == [200, 200, 200] and b"text/plain" in answer.split(b"HTTP/1.1 ")[2]


def test_a_thousand_tiny_pipelined_requests_need_no_deep_stack(small: Edge) -> None:
    answer = exchange(small.port, 1000 * (GET + b"\r\n") + GET + b"connection: close\r\n\r\n")
    assert statuses(answer) == 1001 * [200]


def test_the_limit_of_headers_counts_every_request_of_a_connection_anew(small: Edge) -> None:
    padded = GET + b"x: " + 3000 * b"a" + b"\r\n\r\n"
    with connect(small.port) as sock:
        for _ in range(4):
            sock.sendall(padded)
            assert status(sock.recv(65536)) == 200


def test_a_body_may_come_in_chunks_of_a_byte(small: Edge) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt":"abc"}')
    assert status(exchange(small.port, post(chunks + b"0\r\n\r\n", b"transfer-encoding: chunked"))) == 200


@pytest.mark.parametrize("hosts", ["", "host: localhost\r\nhost: localhost\r\n", "Host: x\r\nx-a: b\r\nhost: y\r\n"])
def test_a_request_of_http_1_1_has_exactly_one_host_header(small: Edge, hosts: str) -> None:
    request = f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode()
    answer = exchange(small.port, request)
    assert status(answer) == 400 and b'"message":"host: exactly one is expected"' in answer
    older = exchange(small.port, request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status(older) == (400 if hosts else 200)


def test_errors_from_500_on_have_the_type_of_a_servers_error(small: Edge) -> None:
    for request, expected in (
        *((post(b"2\r\n{}\r\n0\r\n\r\n", b"transfer-encoding: " + coding), 501) for coding in (b"gzip", b"identity")),
        (post(b"{}").replace(b"HTTP/1.1", b"HTTP/2.0"), 505),
    ):
        answer = exchange(small.port, request)
        assert statuses(answer) == [expected] and b'"type":"server_error"' in answer, answer


# Hosts: a page that lets its name resolve to this machine sends its own name.


@pytest.mark.parametrize("host", cases(__file__, "hosts of this machine"))
def test_without_a_key_loopback_answers_under_names_of_this_machine(small: Edge, host: str) -> None:
    assert ask(small, "GET", "/health", host=host) == 200


@pytest.mark.parametrize("host", cases(__file__, "other hosts"))
def test_without_a_key_loopback_answers_under_no_other_name(small: Edge, host: str) -> None:
    for method, target in (("GET", "/health"), ("GET", "/v1/models"), ("OPTIONS", "/v1/models"), ("POST", "/x")):
        assert ask(small, method, target, f"origin: http://{host}", host=host) == 403, (method, target)


def test_a_host_that_is_refused_is_named_with_the_option_that_allows_it(small: Edge) -> None:
    message = b"host: 'evil.example:8000' is not a name of this machine or an allowed one; if clients use this name, "
    for data in (
        GET.replace(b"localhost", b"evil.example:8000") + b"connection: close\r\n\r\n",
        post().replace(b"localhost", b"evil.example:8000"),
        post(close=False).replace(b"localhost", b"evil.example:8000") + GET + b"connection: close\r\n\r\n",
    ):
        answer = exchange(small.port, data)
        assert status(answer) == 403 and message + b"start the server with --allowed-hosts evil.example" in answer


@pytest.mark.parametrize("kind", ["server", "router"])
@pytest.mark.parametrize(("settings", "answered"), cases(__file__, "answered hosts", pytest=pytest, KEY=KEY))
def test_hosts_are_answered_by_list_key_and_address(kind: str, settings: dict[str, Any], answered: set[str]) -> None:
    with serving(kind, **settings) as edge:
        for host in ("llm.example:80", "[2001:db8::1]", "localhost", "evil.example"):
            expected = 200 if host in answered else 403
            assert ask(edge, "GET", "/v1/models", f"authorization: Bearer {KEY}", host=host) == expected, host


def test_a_host_name_that_resolves_to_loopback_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian lets the machine's own name resolve to 127.0.1.1."""
    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address])
    hosts = Hosts((), "my-machine", has_keys=False)
    assert hosts.refusal(b"My-Machine:8000") is None and hosts.refusal(b"localhost") is None
    assert hosts.refusal(b"evil.example") is not None
    assert hosts.refusal(None) is None  # HTTP/1.0


HEAD = post(b"", b"content-length: %d").partition(b"content-length")[0]
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
TRAILERS = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
FLOODS: dict[str, bytes] = dict(cases(__file__, "floods of headers", GET=GET, TRAILERS=TRAILERS))


CHUNK = b"2711\r\n" + b"x" * 10001 + b"\r\n"
TOO_LARGE = [(name, data, 431, b"4096") for name, data in FLOODS.items()]
TOO_LARGE += [(*row, 413, b"10000 bytes") for row in cases(__file__, "large bodies", HEAD=HEAD, CHUNK=CHUNK)]


@pytest.mark.parametrize(("name", "data", "code", "limit"), TOO_LARGE)
def test_headers_and_bodies_beyond_their_limit_are_refused_and_the_connection_ends(
    small: Edge, name: str, data: bytes, code: int, limit: bytes
) -> None:
    answer = exchange(small.port, data)
    assert status(answer) == code and b'"error":{"message":' in answer and limit in answer
    assert (b"headers" in answer) is (code == 431)
    assert ask(small, "GET", "/health") == 200


def serve_apart() -> None:
    """Serve behind two limits, on the ports that are printed, until standard input closes."""
    kind, *limits = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(kind, limits=Limits(max_header_bytes=int(limit)))) for limit in limits]
        print(*(server.port for server in servers), flush=True)
        sys.stdin.read()


def peak_bytes(pid: int) -> int:
    """Return how much memory the process has had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("kind", ["server", "router"])
def test_headers_beyond_the_limit_take_no_memory(kind: str) -> None:
    """In a process of its own, whose memory grows when another server there has a limit that the same flood stays below."""
    endless, bound = FLOODS["an endless path"], 10_000_000
    code = "from tests.test_edges import serve_apart; serve_apart()"
    with Program("-c", code, kind, "4096", f"{2 * len(endless)}") as program:
        pid, (port, lenient) = program.process.pid, map(int, program.line("").split())
        assert status(exchange(port, GET + b"connection: close\r\n\r\n")) == 200
        before = peak_bytes(pid)
        for flood in [*FLOODS.values(), *[endless] * 20]:
            assert status(exchange(port, flood)) == 431
        assert peak_bytes(pid) - before < bound
        with clients(lenient, *[endless] * 20):
            until(lambda: peak_bytes(pid) - before > bound)


SLOW: dict[str, bytes] = dict(cases(__file__, "slow requests", HEAD=HEAD))


def test_what_does_not_come_is_answered_408(hasty: Edge) -> None:
    with contextlib.ExitStack() as stack:
        opened = {part: stack.enter_context(connect(hasty.port)) for part in SLOW}
        for part, sock in opened.items():
            sock.sendall(SLOW[part])
        for part, sock in opened.items():
            answer = read_all(sock)
            assert status(answer) == 408 and (b"headers" if "headers" in part else b"body") in answer, part
    until(lambda: hasty.num_open() == 0)


def test_the_headers_of_each_request_have_the_same_time(hasty: Edge) -> None:
    with connect(hasty.port) as sock:
        for _ in range(4):
            sock.sendall(GET + b"\r\n")
            assert status(sock.recv(65536)) == 200
            time.sleep(0.3)  # together longer than the limit
        sock.sendall(SLOW["headers"])
        assert status(read_all(sock)) == 408


def test_a_trickling_body_does_not_get_more_time_than_a_silent_one(hasty: Edge) -> None:
    with connect(hasty.port) as sock:
        sock.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                sock.sendall(b"x")
                time.sleep(0.02)
        assert status(read_all(sock)) == 408


def test_a_silent_connection_is_closed_without_a_word(hasty: Edge) -> None:
    with connect(hasty.port) as sock:
        assert read_all(sock) == b""


def test_an_expectation_is_met(small: Edge) -> None:
    head, _, body = post(b'{"prompt":"abc"}', b"expect: 100-continue").partition(b"\r\n\r\n")
    with connect(small.port) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert status(read_all(sock)) == 200


def test_connections_beyond_the_limit_are_told_so_and_places_are_given_back(small: Edge) -> None:
    until(lambda: small.num_connections() == 0)
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = [stack.enter_context(connect(small.port)) for _ in range(20)]
        until(lambda: small.num_connections() == len(held))
        with connect(small.port) as sock:
            answer = read_all(sock)
        assert status(answer) == 503 and b"max-connections" in answer
    until(lambda: small.num_connections() == 0)
    assert ask(small, "GET", "/health") == 200
