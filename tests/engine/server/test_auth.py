"""Every route against every way of asking without a key: closed unless listed as open."""

from collections.abc import Iterator

import pytest

from penstock.engine.http.auth import OPEN_ROUTES, Keys
from penstock.engine.server.server_config import ServerConfig, resolve
from tests.support.running_server import Running, running

KEY = "sk-right"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_keys=(KEY, "sk-other")) as started:
        yield started


def status(server: Running, method: str, target: str, *headers: str, host: str = "x") -> int:
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", "connection: close", *headers]
    with server.connect() as sock:
        sock.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
        answer = sock.recv(65536)  # the head: /kv_events never ends
    return int(answer.split(b" ", 2)[1])


def routes(server: Running) -> list[str]:
    return sorted(path.replace("{model:path}", "tiny") for path in server.app.templates)


def test_without_a_key_only_the_open_routes_answer(server: Running) -> None:
    for path in routes(server):
        for method in METHODS:
            expected = 200 if (method, path) in OPEN_ROUTES else 401
            assert status(server, method, path) == expected, (method, path)


def test_a_wrong_key_is_as_good_as_none(server: Running) -> None:
    for path in routes(server):
        for value in ("Bearer sk-wrong", "Bearer ", "Bearer", "Basic sk-right", "sk-right", "Bearer sk-right-not"):
            if ("GET", path) not in OPEN_ROUTES:
                assert status(server, "GET", path, f"authorization: {value}") == 401, (path, value)


def test_two_authorization_headers_are_refused_even_if_one_is_right(server: Running) -> None:
    right, wrong = f"authorization: Bearer {KEY}", "authorization: Bearer x"
    assert status(server, "GET", "/v1/models", right, wrong) == 401
    assert status(server, "GET", "/v1/models", wrong, right) == 401


def test_a_key_may_come_as_anthropic_sends_it_but_not_beside_a_wrong_one(server: Running) -> None:
    assert status(server, "GET", "/v1/models", f"x-api-key: {KEY}") == 200
    for wrong in ("sk-wrong", "", f"Bearer {KEY}", f"{KEY} {KEY}"):
        assert status(server, "GET", "/v1/models", f"x-api-key: {wrong}") == 401, wrong
    for wrong in ("authorization: Bearer sk-wrong", "authorization: Basic x", "x-api-key: sk-wrong", "x-api-key: "):
        assert status(server, "GET", "/v1/models", f"x-api-key: {KEY}", wrong) == 401, wrong
        assert status(server, "GET", "/v1/models", wrong, f"x-api-key: {KEY}") == 401, wrong


@pytest.mark.parametrize("other", [KEY, "sk-other"])
def test_several_headers_may_carry_keys_that_are_all_accepted(server: Running, other: str) -> None:
    """Anthropic's SDK sends both headers where both of its variables are set."""
    both = f"authorization: Bearer {other}", f"x-api-key: {KEY}"
    assert status(server, "GET", "/v1/models", *both) == 200
    assert (
        Keys((KEY, "sk-other")).number([(b"x-api-key", b"sk-other"), (b"authorization", b"Bearer " + KEY.encode())])
        == 2
    )


@pytest.mark.parametrize("key", [KEY, "sk-other"])
def test_each_of_the_keys_opens_every_route(server: Running, key: str) -> None:
    for path in routes(server):
        answer = status(server, "GET", path, f"authorization: bearer {key}")
        # What is asked for is not stored, or the route was removed.
        others = (404, 405, 400) if path.startswith(("/v1/responses/", "/v1/conversations")) else (200, 405)
        assert answer in others, (path, answer)


SPELLINGS = """
    //v1/models /v1//models /v1/models/ /v1/./models /health/../v1/models /health/%2e%2e/v1/models /%2e/v1/models
    /V1/MODELS /HEALTH //health /health/ /health%20 /health;/v1/models /%76%31/models /metrics /openapi.json
    /invocations /load * http://x/v1/models http://health/metrics
"""


@pytest.mark.parametrize("target", SPELLINGS.split())
def test_no_spelling_of_a_path_gets_round_the_key(server: Running, target: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert status(server, method, target) in (400, 401), (method, target)


@pytest.mark.parametrize("host", ["x/health?", "/health", "x/?", "health", "[::1]/", "x/health#", ""])
def test_the_host_header_has_no_say(server: Running, host: str) -> None:
    assert status(server, "GET", "/v1/models", host=host) == 401


def test_the_path_is_decoded_once_before_it_is_judged_and_routed(server: Running) -> None:
    assert status(server, "GET", "/%68ealth") == 200  # the router would match it, so the gate must too
    assert status(server, "GET", "/%2568ealth") == 401


def test_the_answer_is_in_the_error_format_and_says_nothing_of_the_key(server: Running) -> None:
    answer = server.http.get("/v1/models", headers={"authorization": "Bearer sk-canary"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "canary" not in answer.text


def test_a_body_without_a_key_is_not_read(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")
    assert server.engine.num_admissions == 0


def test_without_configured_keys_everything_is_open() -> None:
    with running() as server:
        assert server.http.get("/v1/models").status_code == 200


def test_a_key_from_the_environment_counts_beside_those_of_the_command_line() -> None:
    config = resolve(ServerConfig(api_keys=("a",)), {"PENSTOCK_API_KEY": "b"})
    assert config.api_keys == ("a", "b")


def test_an_empty_key_is_an_error_and_does_not_open_the_server() -> None:
    with pytest.raises(ValueError, match="PENSTOCK_API_KEY is set but empty"):
        resolve(ServerConfig(), {"PENSTOCK_API_KEY": ""})
    with pytest.raises(ValueError, match="not empty"):
        Keys([""])
    with pytest.raises(ValueError, match="without spaces"):
        Keys(["two words"])
