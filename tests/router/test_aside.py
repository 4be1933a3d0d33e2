"""Canaries, shadows and what each client may ask for."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.engine.http import token_form
from penstock.engine.http.errors import HttpError
from penstock.router.aside import cast_shadows
from penstock.router.backend import Backend, RouteError
from penstock.router.exchange import Outgoing
from penstock.router.quota import Account, Accounts, Bill, Quota, Quotas
from penstock.router.split import with_field
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


def test_a_shadow_that_leaves_before_it_is_asked_is_counted_out_again() -> None:
    with stub() as real, stub() as shadow, running_router(real.url, f"{shadow.url},shadow=1") as router:
        group = router.fleet.group_of("m")

        def leave() -> None:
            cast_shadows(router.app, group, Outgoing(b"/", b"", b"{}", None, None, "m", None, None, 1, b""), b"POST")
            router.fleet.detach(router.fleet.replicas[shadow.url])

        router.call(leave)
        until(lambda: router.app.num_shadows == 0)


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


def left(account: Account) -> float:
    assert account.tokens is not None
    return account.tokens._left


def test_an_answer_is_charged_what_its_usage_says_though_it_comes_in_pieces() -> None:
    whole_answer = b'{"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 470, "total_tokens": 500}}'
    for cut in range(len(whole_answer)):
        account = Account(Quota(tokens=1000), 0.0)
        bill = Bill(account)
        bill.charge(25, 0)  # as the router estimates
        bill.charge(0, 2)
        bill.read(whole_answer[:cut])
        bill.read(whole_answer[cut:])
        bill.end()
        assert left(account) == 500 and account.num_open == 0


def test_a_stream_is_charged_by_its_last_usage_and_by_its_chunks_where_it_has_none() -> None:
    account = Account(Quota(tokens=1000), 0.0)
    bill = Bill(account)
    bill.charge(100, 7)
    for number in (1, 2, 3):  # Anthropic's: without a total
        bill.read(b'data: {"usage": {"output_tokens": %d}}\n\n' % (number * 10))
    bill.read(b'data: {"text": "\\"total_tokens\\": 9"}\n\n')
    bill.end()
    assert left(account) == 1000 - 100 - 30
    bill = Bill(account)
    bill.charge(100, 20)
    bill.end()
    assert left(account) == 1000 - 130 - 120


def test_a_key_pays_for_what_the_replica_counted(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.json"
    quotas.write_text('{"default": {"tokens": 400}}')
    answer = b'{"usage": {"total_tokens": 300}}'
    with stub(lambda seen, sock: whole(answer)) as replica, running_router(replica.url, quotas=str(quotas)) as router:
        statuses = []
        for _ in range(3):
            statuses.append(router.complete("x").status_code)
            until(lambda: not router.app.exchanges)
        assert statuses == [200, 200, 429]


def test_a_keys_class_sets_the_priority_where_a_replica_serves_priorities(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.json"
    quotas.write_text('{"default": {"priority": 5}, "keys": {"sk-first": {"priority": -3}, "sk-own": {}}}')
    wanted = {
        "lowest": {"sk-first": -3, "sk-own": 9, "sk-any": 5},
        "highest": {"sk-first": 3, "sk-own": 9, "sk-any": -5},
    }
    for word in ("lowest", "highest", None):
        with (
            stub() as replica,
            running_router(replica.url + (f",priority={word}" if word else ""), quotas=str(quotas)) as router,
        ):
            for key in ("sk-first", "sk-own", "sk-any"):
                body = {"model": "m", "prompt": "x", "priority": 9}
                headers = {"authorization": f"Bearer {key}"}
                assert httpx.post(router.url + "/v1/completions", json=body, headers=headers).status_code == 200
                expected = wanted[word][key] if word else 9
                assert json.loads(replica.seen[-1].body) == {**body, "priority": expected}
            twice = b'{"prompt": "x", "priority": 1, "priority": -99}'
            answer = router.http.post("/v1/completions", content=twice, headers={"content-type": "application/json"})
            assert answer.status_code == (400 if word else 200)  # or a client might keep the last of the two
    with pytest.raises(RouteError, match="lowest or highest"):
        Backend.of("http://h:1,priority=7")


def test_the_priority_of_a_request_with_ids_is_set_in_its_json() -> None:
    form = token_form.pack({"prompt": msgspec.Raw(b'"x"'), "priority": msgspec.Raw(b"9")}, "prompt", b"\1\0\0\0")
    text, ids = token_form.unpack(with_field(form, True, "priority", -3))
    assert json.loads(text) == {"prompt": None, "priority": -3} and ids == [1]
    with pytest.raises(HttpError, match="more than once"):
        with_field(b'{"priority": 1, "priority": 2}', False, "priority", 0)
