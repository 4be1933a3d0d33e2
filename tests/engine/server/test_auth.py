"""Keys, other origins and seeds of the server alone; tests/test_edges.py asks every route for a key, of the router too."""

from typing import Any

import pytest

from penstock.engine.http.auth import Keys, bearers
from penstock.engine.server.server_config import ServerConfig, resolve
from tests.support.running_server import Running, running, started

KEY = "sk-right"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
PAGE = "https://app.example"


server = started(api_keys=(KEY, "sk-other"))


def test_the_first_of_several_accepted_keys_counts() -> None:
    headers = [(b"x-api-key", b"sk-other"), (b"authorization", b"Bearer " + KEY.encode())]
    assert Keys((KEY, "sk-other")).number(bearers(headers)) == 2


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
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")
    assert server.engine.num_admissions == 0


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


# Web pages of other origins: none may ask, unless the operator names them.


def test_no_page_of_another_origin_may_ask_unless_it_is_told() -> None:
    with running() as server:
        asked = server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 405
        answer = server.complete("abc", max_tokens=1)
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_named_origin_may_ask_with_its_key_and_another_may_not() -> None:
    with running(api_keys=("sk-right",), allowed_origins=(PAGE,)) as server:
        asked = server.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        refused = server.http.options("/v1/chat/completions", headers={"Origin": "https://other.example", **PREFLIGHT})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        fields = {"model": "tiny", "prompt": "abc", "max_tokens": 1}
        unkeyed = server.post("/v1/completions", fields, headers={"Origin": PAGE})
        assert unkeyed.status_code == 401 and unkeyed.headers["access-control-allow-origin"] == PAGE
        keyed = server.post("/v1/completions", fields, headers={"Origin": PAGE, "Authorization": "Bearer sk-right"})
        assert keyed.status_code == 200 and keyed.headers["access-control-allow-origin"] == PAGE


def test_a_seed_of_the_server_is_used_for_requests_without_one() -> None:
    def sampled(**settings: Any) -> list[int | None]:
        with running(**settings) as server:
            for _ in range(3):
                server.complete("abc", max_tokens=1, temperature=1)
            server.complete("abc", max_tokens=1, temperature=1, seed=77)
            return [params.seed for _, params, _ in server.engine.submitted]

    assert sampled(seed=5) == sampled(seed=5) != sampled(seed=6)
    assert len(set(sampled(seed=5))) == 4 and sampled(seed=5)[-1] == 77
    assert sampled() == [None, None, None, 77]  # drawn when it is handed to the core
