"""Prompts computed at one replica for answers at another: who is asked what, and what either's failure does."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.router.backend import RouteError
from penstock.router.config import RouterConfig, resolve
from penstock.router.placement.prompts import CHAT, COMPLETIONS
from penstock.router.prefill import form_with_hint, ids_of, prompt_of, splittable, with_hint
from penstock.router.serve import RouterProcess
from tests.support.raw_http import clients, post, status
from tests.support.refusals import table
from tests.support.router_fleet import ADMIN, RunningRouter, running_router, until
from tests.support.router_stub import Answer, Hold, Seen, Stub, hang_up, ok, stub, whole

LONG = "a prompt of some length " * 200
PEER = "10.0.0.5:9100"
ASKED = post(json.dumps({"prompt": LONG}).encode())


def when_both_are_asked(prefills: list[Stub]) -> Answer:
    """Answers once the prompt was read where it is computed, if it is: the first byte ends the prefill."""

    def answer(seen: Seen, sock: socket.socket) -> bytes:
        asked = fields(seen)
        if asked.get("kv_transfer_params") is not None:
            until(lambda: any(fields(read)["prompt"] == asked["prompt"] for each in prefills for read in each.seen))
        return whole()

    return answer


@contextlib.contextmanager
def split_fleet(
    prefills: int = 1, decodes: int = 1, **settings: Any
) -> Iterator[tuple[list[Stub], list[Stub], RunningRouter]]:
    with contextlib.ExitStack() as stack:
        computing = [stack.enter_context(stub()) for _ in range(prefills)]
        answering = [stack.enter_context(stub(when_both_are_asked(computing))) for _ in range(decodes)]
        given = [f"{each.url},prefill=10.0.0.{index}:9100" for index, each in enumerate(computing)]
        router = stack.enter_context(running_router(*(each.url for each in answering), *given, **settings))
        yield computing, answering, router
        until(lambda: router.call(lambda: is_at_rest(router.router)))


def is_at_rest(router: RouterProcess) -> bool:
    """Nothing is charged any more."""
    for _, group in router.fleet.all_groups():
        group.placement.check()
    router.app.check()
    active = sum(group.placement.loads.active.sum() for _, group in router.fleet.all_groups())
    return router.fleet.num_in_flight == active == 0 and not router.app.exchanges


def fields(seen: Seen) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(seen.body)
    return found


def test_a_long_prompt_goes_to_both_and_a_short_one_to_the_decode_replica_alone() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        assert router.complete(LONG, cache_salt="s", stop=["x"], n=2).status_code == 200
        assert router.complete("short").status_code == 200
        (asked,) = map(fields, prefill.seen)
        assert asked == {"prompt": LONG, "cache_salt": "s", "max_tokens": 1, "temperature": 0}
        first, second = map(fields, decode.seen)
        hint = first.pop("kv_transfer_params")
        assert hint["peer"] == "10.0.0.0:9100" and 2 <= hint["wait_s"] <= 60
        assert first == {"prompt": LONG, "max_tokens": 4, "temperature": 0, "cache_salt": "s", "stop": ["x"], "n": 2}
        assert "kv_transfer_params" not in second
        assert router.counts("split_requests") == {"split": 1, "direct": 1}
        roles = {each["url"]: each["role"] for each in router.http.get("/replicas").json()["replicas"]}
        assert roles == {prefill.url: "prefill", decode.url: "decode"}


def test_a_prompt_that_is_cached_where_it_is_answered_is_not_computed_elsewhere() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        for tail in ("", " and", " and more"):
            assert router.complete(LONG + tail).status_code == 200
        assert router.complete(LONG + " and another end " * 200).status_code == 200
        assert [len(fields(seen)["prompt"]) > len(LONG) for seen in prefill.seen] == [False, True]
        assert ["kv_transfer_params" in fields(seen) for seen in decode.seen] == [True, False, False, True]


def test_a_prompt_that_is_on_its_way_is_not_taken_for_cached() -> None:
    with split_fleet() as (_, (decode,), router):
        decode.answer = first = Hold()
        with clients(router.port, ASKED) as (one,):
            assert first.is_asked.wait(60)
            with clients(router.port, ASKED) as (other,):
                until(lambda: len(decode.seen) == 2)
                first.go.set()
                assert [status(sock.recv(4096)) for sock in (one, other)] == [200, 200]
        assert all("kv_transfer_params" in fields(seen) for seen in decode.seen)


def test_the_threshold_is_the_operators() -> None:
    with split_fleet(prefill_threshold=10) as ((prefill,), _, router):
        router.complete("word " * 20)
        assert len(prefill.seen) == 1
    with split_fleet(prefill_threshold=2000) as ((prefill,), _, router):
        router.complete(LONG)
        assert not prefill.seen


@pytest.mark.parametrize("broken", [hang_up, lambda seen, sock: whole(b"{}", b"500 Internal Server Error")])
def test_when_a_prefill_replica_fails_another_is_asked_and_the_decode_replica_anew(broken: Answer) -> None:
    with split_fleet(prefills=2) as (prefills, (decode,), router):
        decode.answer = first = Hold()
        failing: list[Stub] = []

        def fail(each: Stub) -> Answer:
            def answer(seen: Seen, sock: socket.socket) -> bytes | None:
                first.is_asked.wait(60)
                if not failing:
                    failing.append(each)
                return (broken if each in failing else ok)(seen, sock)

            return answer

        for each in prefills:
            each.answer = fail(each)
        with clients(router.port, ASKED) as (sock,):
            assert first.is_left.wait(60)  # the leg that waited for the blocks of the one that failed
            until(lambda: all(each.seen for each in prefills))  # the first byte ends a prefill that was not yet read
            first.go.set()
            assert status(sock.recv(4096)) == 200
        peers = [fields(seen)["kv_transfer_params"]["peer"] for seen in decode.seen]
        assert len(set(peers)) == 2 and all(each.seen for each in prefills)


def unless_referred(answer: bytes) -> Answer:
    """Waits for ever for blocks, and gives this answer where it computes them itself."""
    return lambda seen, sock: Hold()(seen, sock) if "kv_transfer_params" in fields(seen) else answer


def test_when_no_prefill_replica_is_left_the_decode_replica_computes_the_prompt() -> None:
    with split_fleet(prefills=2) as (prefills, (decode,), router):
        decode.answer = unless_referred(whole())
        for each in prefills:
            each.answer = hang_up
        assert router.complete(LONG).status_code == 200
        assert router.complete(LONG + LONG).status_code == 200
        assert all(each.seen for each in prefills)


def test_a_prompt_that_a_prefill_replica_refuses_is_left_to_the_decode_replica() -> None:
    with split_fleet(prefills=2) as (prefills, (decode,), router):
        for each in prefills:
            each.answer = lambda seen, sock: whole(b"{}", b"400 Bad Request")
        decode.answer = unless_referred(whole(b'{"error":{}}', b"400 Bad Request"))
        answer = router.complete(LONG)
        assert (answer.status_code, answer.content) == (400, b'{"error":{}}')
        assert sum(len(each.seen) for each in prefills) == 1
        assert router.counts("prefills") == {"failed": 1}


@pytest.mark.parametrize("broken", [hang_up, lambda seen, sock: whole(b"{}", b"503 Service Unavailable")])
def test_when_the_decode_replica_fails_the_prefill_is_dropped_and_both_are_asked_anew(broken: Answer) -> None:
    with split_fleet(decodes=2) as ((prefill,), decodes, router):
        holds: list[Hold] = []

        def hold(seen: Seen, sock: socket.socket) -> bytes | None:
            holds.append(Hold())
            return holds[-1](seen, sock)

        prefill.answer = hold
        failing: list[Stub] = []

        def answer(each: Stub) -> Answer:
            def answer(seen: Seen, sock: socket.socket) -> bytes | None:
                if not failing:
                    failing.append(each)
                if each in failing:
                    until(lambda: bool(holds) and holds[-1].is_asked.is_set())
                    return broken(seen, sock)
                assert holds[0].is_left.wait(60)
                until(lambda: len(holds) == 2)  # else the first byte ends a prefill that was not yet read
                return whole()

            return answer

        for each in decodes:
            each.answer = answer(each)
        assert router.complete(LONG).status_code == 200
        assert len(holds) == 2 and holds[1].is_left.wait(60)
        assert router.counts("prefills") == {"dropped": 2}


def test_who_leaves_takes_both_legs_along() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        prefill.answer, decode.answer = computing, answering = Hold(), Hold()
        with clients(router.port, ASKED):
            assert computing.is_asked.wait(60) and answering.is_asked.wait(60)
        assert computing.is_left.wait(60) and answering.is_left.wait(60)


def test_the_first_byte_of_an_answer_ends_the_prefill() -> None:
    with split_fleet() as ((prefill,), _, router):
        prefill.answer = computing = Hold()
        assert router.complete(LONG).status_code == 200
        assert not computing.is_asked.is_set() or computing.is_left.wait(60)
        assert router.counts("prefills") == {"dropped": 1}


def test_a_prefill_replica_that_goes_down_meanwhile_is_waited_for_no_longer() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        prefill.answer = computing = Hold()
        decode.answer = answering = Hold()
        with clients(router.port, ASKED) as (sock,):
            assert computing.is_asked.wait(60) and answering.is_asked.wait(60)
            decode.answer = lambda seen, sock: whole(b'{"well":1}')
            router.refuse(prefill.url)
            assert sock.recv(4096).endswith(b'{"well":1}')
        assert computing.is_left.wait(60) and answering.is_left.wait(60)
        assert "kv_transfer_params" not in fields(decode.seen[-1])


def test_that_a_decode_replica_does_not_know_the_peer_is_said_to_the_client() -> None:
    said = b'{"error":{"message":"kv_transfer_params.peer: ... is not a --kv-peer of this engine"}}'
    with split_fleet() as ((prefill,), (decode,), router):
        prefill.answer = Hold()
        decode.answer = lambda seen, sock: whole(said, b"400 Bad Request")
        answer = router.complete(LONG)
        assert (answer.status_code, answer.content) == (400, said)


def test_clients_do_not_choose_the_peer() -> None:
    with split_fleet() as (_, (decode,), router):
        answer = router.complete("short", kv_transfer_params={"peer": PEER})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
        assert not decode.seen
        assert router.complete("short", kv_transfer_params=None).status_code == 200
    with stub() as alone, running_router(alone.url) as router:
        assert router.complete("short", kv_transfer_params={"peer": PEER}).status_code == 200


def test_replicas_that_compute_prompts_come_and_go() -> None:
    with stub() as decode, stub() as prefill, running_router(decode.url, admin_api_keys=(ADMIN,)) as router:
        decode.answer = when_both_are_asked([prefill])
        assert router.complete(LONG).status_code == 200
        assert router.change("POST", url=f"{prefill.url},prefill=nowhere").status_code == 400
        assert router.change("POST", url=f"{prefill.url},prefill={PEER}").status_code == 200
        until(lambda: router.states() == ["up", "up"])
        assert router.complete("b" + LONG).status_code == 200
        assert fields(decode.seen[-1])["kv_transfer_params"]["peer"] == PEER
        assert router.change("DELETE", url=prefill.url).status_code == 200
        until(lambda: router.states() == ["up"])
        assert router.complete("c" + LONG).status_code == 200
        assert "kv_transfer_params" not in fields(decode.seen[-1]) and len(prefill.seen) == 1


def test_a_prefill_replica_answers_no_client() -> None:
    with stub() as prefill, running_router(f"{prefill.url},prefill={PEER}") as router:
        assert router.complete("short").status_code == 503
        assert router.http.get("/ready").status_code == 503
        assert not prefill.seen


# The bodies.

IDS = b"\x01\x00\x00\x00\x02\x00\x00\x00"


def test_a_prefill_is_asked_for_one_token_of_what_makes_the_prompt_and_nothing_else() -> None:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "é"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
        "max_completion_tokens": 500,
        "stream": True,
        "response_format": {"type": "json_object"},
        "logprobs": True,
        "request_id": "r",
    }
    asked = json.loads(prompt_of(split_object(json.dumps(chat).encode())))
    kept = {name: chat[name] for name in ("model", "messages", "tools", "chat_template_kwargs")}
    assert asked == {**kept, "max_tokens": 1, "temperature": 0}
    assert "tools" not in json.loads(prompt_of(split_object(json.dumps({**chat, "tool_choice": "none"}).encode())))


def test_ids_stay_ids_in_both_bodies() -> None:
    form = token_form.join(b'{"messages":null,"model":"m","stream":true,"cache_salt":"s"}', IDS)
    head, ids = token_form.cut(ids_of(form))
    assert ids == IDS
    assert json.loads(head) == {"prompt": None, "model": "m", "cache_salt": "s", "max_tokens": 1, "temperature": 0}
    head, ids = token_form.cut(form_with_hint(form, {"peer": PEER, "wait_s": 3.0}))
    assert ids == IDS
    hint = {"kv_transfer_params": {"peer": PEER, "wait_s": 3.0}}
    assert json.loads(head) == {"messages": None, "model": "m", "stream": True, "cache_salt": "s", **hint}


def test_a_null_hint_of_the_client_is_replaced() -> None:
    body = b'{"prompt": "a", "kv_transfer_params": null, "seed": 1.50}'
    assert with_hint(split_object(body), {"peer": PEER, "wait_s": 2}) == (
        b'{"prompt":"a","kv_transfer_params":{"peer":"10.0.0.5:9100","wait_s":2},"seed":1.50}'
    )


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    table(__file__, "split", CHAT=CHAT, COMPLETIONS=COMPLETIONS),
)
def test_what_needs_every_position_computed_is_not_split(path: str, body: bytes, expected: bool) -> None:
    assert (splittable(path, body, None) is not None) is expected


# What the operator says.


def test_a_replica_has_one_role_and_the_threshold_is_a_number_of_tokens() -> None:
    twice = RouterConfig(backends=("http://h:1", f"http://h:1,prefill={PEER}"))
    with pytest.raises(RouteError, match="more than once"):
        resolve(twice, {})
    with pytest.raises(RouteError, match="prefill_threshold"):
        resolve(RouterConfig(prefill_threshold=0), {})
