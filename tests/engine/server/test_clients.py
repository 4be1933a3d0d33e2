"""Which requests are of one client, and so share its turns in the queue of the engine."""

import contextlib

import pytest

from tests.support.router_fleet import running_router
from tests.support.running_server import running

KEYS = ("sk-1", "sk-2")
BY_SESSION = [{}, {}, {"x-session-id": "a"}, {"x-session-id": "b"}, {"x-session-id": "a"}]
BY_KEY = [{"x-api-key": key, "x-session-id": session} for key, session in zip("1221", "aaba", strict=True)]


@pytest.mark.parametrize(
    ("keys", "router_keys", "headers", "expected"),
    [
        ((), None, BY_SESSION, "00121"),
        ((), (), BY_SESSION, "00121"),
        ((), KEYS, BY_KEY, "0110"),
        (KEYS, KEYS, BY_KEY, "0110"),
        (KEYS, None, BY_KEY, "0110"),
        (KEYS, (), BY_SESSION, "00000"),  # the router sends its own key
    ],
    ids=["server", "router", "router with keys", "both with keys", "server with keys", "only the server has keys"],
)
def test_requests_are_told_apart_by_key_and_without_keys_by_session(
    keys: tuple[str, ...], router_keys: tuple[str, ...] | None, headers: list[dict[str, str]], expected: str
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(api_keys=keys))
        http = server.http
        if router_keys is not None:
            backend_key = keys[0] if keys else None
            router = running_router(server.url, api_keys=router_keys, backend_api_key=backend_key)
            http = stack.enter_context(router).http
        for each in headers:
            sent = each | ({"x-api-key": f"sk-{each['x-api-key']}"} if "x-api-key" in each else {})
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
            assert http.post("/v1/completions", json=body, headers=sent).status_code == 200
    clients = [options["client"] for *_, options in server.engine.submitted]
    assert "".join(str(list(dict.fromkeys(clients)).index(client)) for client in clients) == expected
