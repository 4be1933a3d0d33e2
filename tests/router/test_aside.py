"""Canaries, shadows and what each client may ask for."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.router.backend import RouteError
from penstock.router.quota import Accounts, Quota, Quotas
from tests.support.router_fleet import running_router, until
from tests.support.router_stub import stub, whole


def test_a_canary_gets_its_share_and_no_turn() -> None:
    with stub() as old, stub() as new, running_router(old.url, f"{new.url},canary=0.2") as router:
        for _ in range(200):
            assert router.complete(model="m").status_code == 200
        assert 10 < len(new.seen) < 90 and len(old.seen) == 200 - len(new.seen)
        new.answer = lambda seen, sock: None  # it breaks: the others answer
        for _ in range(30):
            assert router.complete(model="m").status_code == 200


def test_a_shadow_sees_what_the_others_see_and_its_answers_are_dropped() -> None:
    failing = stub(lambda seen, sock: whole(b"no", b"500 Oh"))
    with stub() as real, failing as shadow, running_router(real.url, f"{shadow.url},shadow=1") as router:
        for number in range(5):
            assert router.complete(f"number {number}", model="m").json() == {}
        until(lambda: router.counts("shadows") == {"500": 5})
        assert sorted(seen.body for seen in shadow.seen) == sorted(seen.body for seen in real.seen)
        assert shadow.seen[0].header(b"content-type") == [b"application/json"]


def test_each_client_has_what_its_key_may_ask_for(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.json"
    quotas.write_text('{"default": {"requests": 3}, "keys": {"sk-large": {"requests": 100, "tokens": 50}}}')
    body = {"model": "m", "prompt": "x" * 120}

    with stub() as replica, running_router(replica.url, quotas=str(quotas)) as router:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(router.url + "/v1/completions", json=body, headers=headers)

        assert [ask("sk-any").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert ask("sk-other").status_code == 200
        refused = [answer for _ in range(4) if (answer := ask("sk-large")).status_code == 429]
        assert len(refused) == 2  # two prompts of thirty tokens are more than fifty
        assert "50 tokens a minute" in refused[0].json()["error"]["message"]
        assert 1 <= int(refused[0].headers["retry-after"]) <= 60
        until(lambda: all(not each.num_open for each in (router.app.accounts or never())._accounts.values()))


def never() -> Any:
    raise AssertionError


def test_a_minutes_worth_comes_back_evenly() -> None:
    now_s = 0.0
    accounts = Accounts(Quotas(default=Quota(requests=60, concurrent=2)), lambda: now_s)
    account = accounts.of(b"")
    for _ in range(60):
        assert accounts.objection(b"") is None
        account.begin()
        account.end()
    refused = accounts.objection(b"")
    assert refused is not None and refused.status == 429
    now_s = 1.0
    assert accounts.objection(b"") is None
    account.begin()
    now_s = 10.0
    account.begin()
    assert "at a time" in str(accounts.objection(b""))


def test_a_file_of_quotas_that_is_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    for text in ("{", '{"default": {"requests": 0}}', '{"colour": 1}', '{"keys": {"": {}}}'):
        path.write_text(text)
        with pytest.raises(RouteError, match="quotas"):
            Quotas.read(str(path))
    with pytest.raises(RouteError, match="No such file"):
        Quotas.read(str(tmp_path / "none"))
