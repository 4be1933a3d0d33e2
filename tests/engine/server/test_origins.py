"""Web pages of other origins: none may ask, unless the operator names them."""

from typing import Any

import pytest

from tests.support.running_server import running

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
PAGE = "https://app.example"


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


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "", "https://"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins: .* is no origin"), running(allowed_origins=(origin,)):
        pass


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
