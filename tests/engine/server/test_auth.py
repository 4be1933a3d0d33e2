"""Keys of the server alone; tests/test_edges.py asks every route for a key, of the router too."""

from collections.abc import Iterator

import pytest

from penstock.engine.http.auth import Keys
from penstock.engine.server.server_config import ServerConfig, resolve
from tests.support.running_server import Running, running

KEY = "sk-right"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(api_keys=(KEY, "sk-other")) as started:
        yield started


def test_the_first_of_several_accepted_keys_counts() -> None:
    headers = [(b"x-api-key", b"sk-other"), (b"authorization", b"Bearer " + KEY.encode())]
    assert Keys((KEY, "sk-other")).number(headers) == 2


def test_the_path_is_decoded_once_before_it_is_judged_and_routed(server: Running) -> None:
    assert server.http.get("/%68ealth").status_code == 200  # the router would match it, so the gate must too
    assert server.http.get("/%2568ealth").status_code == 401


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
