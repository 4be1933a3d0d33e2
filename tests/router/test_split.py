"""Prompts computed at one replica for answers at another: what each replica is sent, and what follows if either fails.
Split requests through real engines: they make the tokens of a single engine, and the blocks did move."""

import contextlib
import json
import random
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.engine.http import token_form
from penstock.router.placement.prompts import CHAT, COMPLETIONS
from penstock.router.prefill import form_with_hint, ids_of
from penstock.router.serve import RouterProcess
from tests.support import router_stub
from tests.support.default_file import default_file
from tests.support.oracle_engine import SECRET, is_connected, peer
from tests.support.peer_rig import free_addresses
from tests.support.programs import Command
from tests.support.raw_http import clients, post, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import ADMIN, RunningRouter, mock_replicas, running_router, until
from tests.support.router_stub import Answer, Hold, Seen, Stub, first_fails, hang_up, in_turn, ok, sick, stub, whole
from tests.support.running_server import Running, running

LONG = "a prompt of some length " * 200
PEER = "10.0.0.5:9100"
REQUEST = post(json.dumps({"prompt": LONG}).encode())
REFUSAL = b'{"error":{}}'


def fields(seen: Seen) -> dict[str, Any]:
    return dict(json.loads(seen.body))


def prompt_in(seen: Seen) -> Any:
    return fields(seen).get("prompt") or fields(seen)["messages"]


def when_both_are_asked(prefills: list[Stub]) -> Answer:
    """Answer once the prompt was read where it is computed, if it is: the first byte ends the prefill."""

    def answer(seen: Seen, sock: socket.socket) -> bytes:
        if "kv_transfer_params" in fields(seen):
            until(lambda: prompt_in(seen) in [prompt_in(read) for each in prefills for read in each.seen])
        return whole()

    return answer


def refuse(seen: Seen, sock: socket.socket) -> bytes:
    return whole(REFUSAL, b"400 Bad Request")


def if_alone(answer: Answer) -> Answer:
    """Wait for blocks for ever, and give this answer to a request whose prompt is to be computed here."""
    return lambda seen, sock: (Hold() if "kv_transfer_params" in fields(seen) else answer)(seen, sock)


@contextlib.contextmanager
def split_fleet(
    prefills: int = 1, decodes: int = 1, **settings: Any
) -> Iterator[tuple[list[Stub], list[Stub], RunningRouter]]:
    with contextlib.ExitStack() as stack:
        computing = [stack.enter_context(stub()) for _ in range(prefills)]
        answering = [stack.enter_context(stub(when_both_are_asked(computing))) for _ in range(decodes)]
        backends = [f"{each.url},prefill=10.0.0.{index}:9100" for index, each in enumerate(computing)]
        router = stack.enter_context(running_router(*(each.url for each in answering), *backends, **settings))
        yield computing, answering, router
        until(lambda: router.call(lambda: is_at_rest(router.router)))


def is_at_rest(router: RouterProcess) -> bool:
    """Check the invariants, and return whether nothing is charged any more."""
    for _, group in router.fleet.all_groups():
        group.placement.check()
    router.app.check()
    active = sum(group.placement.loads.active.sum() for _, group in router.fleet.all_groups())
    return router.fleet.num_in_flight == active == 0 and not router.app.exchanges


def test_a_long_prompt_goes_to_both_and_a_short_one_to_the_decode_replica() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        assert router.complete(LONG, cache_salt="s", stop=["x"], n=2).status_code == 200
        assert router.complete("short").status_code == 200
        (sent,) = map(fields, prefill.seen)
        assert sent == {"prompt": LONG, "cache_salt": "s", "max_tokens": 1, "temperature": 0}
        first, second = map(fields, decode.seen)
        hint = first.pop("kv_transfer_params")
        assert hint["peer"] == "10.0.0.0:9100" and 2 <= hint["wait_s"] <= 60
        assert first == {"prompt": LONG, "max_tokens": 4, "temperature": 0, "cache_salt": "s", "stop": ["x"], "n": 2}
        assert "kv_transfer_params" not in second
        assert router.counts("split_requests") == {"split": 1, "direct": 1}
        roles = {each["url"]: each["role"] for each in router.http.get("/replicas").json()["replicas"]}
        assert roles == {prefill.url: "prefill", decode.url: "decode"}


@pytest.mark.parametrize(("path", "body", "settings", "is_split"), table(__file__, "split", **globals()))
def test_only_long_prompts_of_which_not_every_position_is_needed_are_split(
    path: str, body: Any, settings: dict[str, int], is_split: bool
) -> None:
    """The operator sets the length."""
    with split_fleet(**settings) as ((prefill,), (decode,), router):
        assert router.http.post(path, json=body).status_code == 200
        assert bool(prefill.seen) == is_split
        assert ("kv_transfer_params" in fields(decode.seen[0])) == is_split


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
def test_a_prefill_replica_gets_what_makes_the_prompt(tool_choice: str) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "é" + LONG}], "chat_template_kwargs": {"a": 1}}
    tools = {"tools": [{"type": "function"}]}
    others = {"max_completion_tokens": 500, "response_format": {"type": "json_object"}, "logprobs": True}
    with split_fleet() as ((prefill,), _, router):
        router.http.post(CHAT, json={**chat, **tools, **others, "request_id": "r", "tool_choice": tool_choice})
        (sent,) = map(fields, prefill.seen)
        assert sent == {**chat, **(tools if tool_choice == "auto" else {}), "max_tokens": 1, "temperature": 0}


def test_token_ids_stay_ids_in_both_bodies() -> None:
    ids = b"\x01\x00\x00\x00\x02\x00\x00\x00"
    form = token_form.join(b'{"messages":null,"model":"m","stream":true,"cache_salt":"s"}', ids)
    head, prefill_ids = token_form.cut(ids_of(form))
    assert json.loads(head) == {"prompt": None, "model": "m", "cache_salt": "s", "max_tokens": 1, "temperature": 0}
    hint = {"peer": PEER, "wait_s": 3.0}
    head, decode_ids = token_form.cut(form_with_hint(form, hint))
    assert json.loads(head) == {
        "messages": None, "model": "m", "stream": True, "cache_salt": "s", "kv_transfer_params": hint
    }  # fmt: skip
    assert prefill_ids == decode_ids == ids


def test_a_prompt_that_is_cached_where_it_is_answered_is_not_computed_elsewhere() -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        for tail in ("", " and", " and more"):
            assert router.complete(LONG + tail).status_code == 200
        assert router.complete(LONG + " and another end " * 200).status_code == 200
        assert [len(fields(seen)["prompt"]) > len(LONG) for seen in prefill.seen] == [False, True]
        assert ["kv_transfer_params" in fields(seen) for seen in decode.seen] == [True, False, False, True]


def test_a_prompt_is_not_computed_elsewhere_if_the_queue_is_longer_than_a_minute() -> None:
    with split_fleet() as ((prefill,), _, router):
        placement = next(iter(router.fleet.prefills.values())).placement
        router.call(lambda: placement.loads.learn(0, 1.0))  # a token per second
        assert router.complete(LONG).status_code == 200
        assert not prefill.seen and router.num_blocks(prefill.url) == 0
        assert placement.metrics()["requests_failed_total"] == 0


def test_a_prompt_that_is_on_its_way_is_not_taken_for_cached() -> None:
    with split_fleet() as (_, (decode,), router):
        decode.answer = hold = Hold()
        with clients(router.port, REQUEST, REQUEST) as socks:
            until(lambda: len(decode.seen) == 2)
            hold.go.set()
            assert [status(sock.recv(4096)) for sock in socks] == [200, 200]
        assert all("kv_transfer_params" in fields(seen) for seen in decode.seen)


@pytest.mark.parametrize("broken", [hang_up, sick])
def test_when_a_prefill_replica_fails_another_one_is_asked(broken: Answer) -> None:
    with split_fleet(prefills=2) as (prefills, (decode,), router):
        first = Hold()  # waits for the blocks of the prefill replica that fails

        def fail(seen: Seen, sock: socket.socket) -> bytes | None:
            assert first.is_asked.wait(60)
            return broken(seen, sock)

        def succeed(seen: Seen, sock: socket.socket) -> bytes:
            until(lambda: all(each.seen for each in prefills))  # the first byte ends a prefill that was not yet read
            return whole()

        decode.answer = in_turn(first, succeed)
        prefills[0].answer = prefills[1].answer = first_fails(fail, ok)
        assert router.complete(LONG).status_code == 200
        assert first.is_left.wait(60)
        assert len({fields(seen)["kv_transfer_params"]["peer"] for seen in decode.seen}) == 2


@pytest.mark.parametrize("broken", [hang_up, lambda seen, sock: whole(b"{}", b"503 Service Unavailable")])
def test_when_the_decode_replica_fails_both_are_asked_anew(broken: Answer) -> None:
    with split_fleet(decodes=2) as ((prefill,), decodes, router):
        first, second = holds = Hold(), Hold()

        def fail(seen: Seen, sock: socket.socket) -> bytes | None:
            assert first.is_asked.wait(60)
            return broken(seen, sock)

        def succeed(seen: Seen, sock: socket.socket) -> bytes:
            assert first.is_left.wait(60) and second.is_asked.wait(60)
            return whole()

        prefill.answer = in_turn(*holds)
        decodes[0].answer = decodes[1].answer = first_fails(fail, succeed)
        assert router.complete(LONG).status_code == 200
        assert second.is_left.wait(60)
        assert router.counts("prefills") == {"dropped": 2}


@pytest.mark.parametrize(
    ("failure", "prefill", "decode", "code", "body", "counts"),
    cases(__file__, "failures of split requests", **vars(router_stub) | globals()),
)
def test_each_kind_of_failure_has_its_answer(
    failure: str, prefill: Answer, decode: Answer | None, code: int, body: bytes, counts: dict[str, int]
) -> None:
    """Both prefill replicas and the decode replica answer so."""
    with split_fleet(prefills=2) as (prefills, decodes, router):
        for each in prefills:
            each.answer = prefill
        decodes[0].answer = decode or decodes[0].answer
        answer = router.complete(LONG)
        assert (answer.status_code, answer.content) == (code, body)
        assert router.counts("prefills") == counts
        if isinstance(prefill, Hold):
            assert not prefill.is_asked.is_set() or prefill.is_left.wait(60)


@pytest.mark.parametrize("is_down", [False, True])
def test_a_client_that_leaves_or_a_prefill_replica_that_goes_down_ends_both_legs(is_down: bool) -> None:
    with split_fleet() as ((prefill,), (decode,), router):
        prefill.answer, decode.answer = computing, answering = Hold(), Hold()
        with clients(router.port, REQUEST) as (sock,):
            assert computing.is_asked.wait(60) and answering.is_asked.wait(60)
            if is_down:
                decode.answer = lambda seen, sock: whole(b'{"well":1}')
                router.refuse(prefill.url)
                assert sock.recv(4096).endswith(b'{"well":1}')
                assert "kv_transfer_params" not in fields(decode.seen[-1])
        assert computing.is_left.wait(60) and answering.is_left.wait(60)


def test_clients_do_not_choose_the_peer() -> None:
    with split_fleet() as (_, (decode,), router):
        answer = router.complete("short", kv_transfer_params={"peer": PEER})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
        assert not decode.seen
        body = REQUEST.partition(b"\r\n\r\n")[2].replace(b"{", b'{"kv_transfer_params": null, "seed": 1.50, ')
        router.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert fields(decode.seen[0])["kv_transfer_params"]["peer"] == "10.0.0.0:9100"
        assert decode.seen[0].body.count(b"kv_transfer_params") == 1 and b'"seed":1.50' in decode.seen[0].body
    with stub() as alone, running_router(alone.url) as router:
        assert router.complete("short", kv_transfer_params={"peer": PEER}).status_code == 200


def test_replicas_that_compute_prompts_come_and_go() -> None:
    with stub() as decode, stub() as prefill, running_router(decode.url, admin_api_keys=(ADMIN,)) as router:
        decode.answer = when_both_are_asked([prefill])
        assert router.complete(LONG).status_code == 200
        refused = router.change("POST", url=f"{prefill.url},prefill=nowhere")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url")
        assert router.change("POST", url=f"{prefill.url},prefill={PEER}").status_code == 200
        until(lambda: router.states() == ["up", "up"])
        assert router.complete("b" + LONG).status_code == 200
        assert fields(decode.seen[-1])["kv_transfer_params"]["peer"] == PEER
        assert router.change("DELETE", url=prefill.url).status_code == 200
        until(lambda: router.states() == ["up"])
        assert router.complete("c" + LONG).status_code == 200
        assert "kv_transfer_params" not in fields(decode.seen[-1]) and len(prefill.seen) == 1


def test_a_prompt_for_a_name_that_no_prefill_replica_serves_is_computed_where_it_is_answered() -> None:
    with stub() as decode, stub() as prefill:
        decode.models = b'{"data": [{"id": "m"}, {"id": "sql", "root": "m", "parent": "m"}]}'
        with running_router(decode.url, f"{prefill.url},prefill={PEER}") as router:
            assert router.complete(LONG, model="sql").status_code == 200
    assert not prefill.seen and len(decode.seen) == 1


def test_a_prefill_replica_answers_no_client() -> None:
    with stub() as prefill, running_router(f"{prefill.url},prefill={PEER}") as router:
        assert router.complete("short").status_code == 503
        assert router.http.get("/ready").status_code == 503
        assert not prefill.seen


WORDS = ["rivers", "bridges", "bread", "moon", "ships", "chess", "winter", "violins", "maps", "bees", "glass", "trains"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Running, Running, RunningRouter]]:
    (address,) = free_addresses(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("PENSTOCK_KV_PEER_SECRET", SECRET)
        prefill = stack.enter_context(running(peer(kv_peer_listen=address)))
        decode = stack.enter_context(running(peer(kv_peers=(address,))))
        until(lambda: is_connected(decode))
        backend = f"{prefill.url},prefill={address}"
        router = running_router(decode.url, backend, prefill_threshold=64, tokenizes=True)
        yield prefill, decode, stack.enter_context(router)


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return token ids and usage of an answer that comes as events."""
    ids: list[int] = []
    usage: dict[str, Any] = {}
    with http.stream("POST", path, json=body | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                ids += [token for choice in event["choices"] for token in choice["token_ids"]]
                usage = event["usage"] or usage
    return ids, usage


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_tokens_are_those_of_one_engine_though_two_compute_them(fleet: tuple[Running, Running, RunningRouter]) -> None:
    _, _, router = fleet
    rng = random.Random(1)
    with running(peer()) as single:
        for number in range(12):
            text = f"{number} " + " ".join(rng.choices(WORDS, k=rng.randrange(30, 200)))
            fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "seed": number}
            if number % 2:
                path, fields = "/v1/completions", fields | {"prompt": text}
            else:
                path, fields = "/v1/chat/completions", fields | {"messages": [{"role": "user", "content": text}]}
            if number % 3 == 0:
                fields |= {"logprobs": 2 if number % 2 else True}  # not a field of the prompt
            expected, _ = streamed(single.http, path, fields)
            ids, usage = streamed(router.http, path, fields)
            assert ids == expected and len(ids) == 8
            assert cached(usage) == (usage["prompt_tokens"] - 1) // 16 * 16
    text = router.http.get("/metrics").text
    assert 'penstock:router_split_requests_total{path="split"} 12.0' in text
    assert sum(map(int, re.findall(r'router_prefills_total\{outcome="(?:computed|dropped)"\} (\d+)', text))) == 12


def test_a_prefill_replica_that_is_killed_under_load_fails_no_request() -> None:
    addresses = free_addresses(2)
    pace = {"prefill_tps": 20_000, "inter_token_s": 0.005, "kv_host_bytes": 1 << 22}
    with contextlib.ExitStack() as stack:
        prefills = [stack.enter_context(mock_replicas(1, kv_peer_listen=each, **pace))[0] for each in addresses]
        (decode,) = stack.enter_context(mock_replicas(1, kv_peers=addresses, **pace))
        backends = [f"{each.url},prefill={address}" for each, address in zip(prefills, addresses, strict=True)]
        router = stack.enter_context(running_router(decode.url, *backends))

        def ask(number: int) -> int:
            if number == 10:  # stopped, it cannot finish what it has before it is killed
                prefills[1].send(signal.SIGSTOP)
                router.http.get("/health")  # answered after what had come before the stop was read
                until(lambda: router.fleet.replicas[prefills[1].url].num_in_flight > 0)
                prefills[1].send(signal.SIGKILL)
            prompt = random.Random(number).choices(range(256), k=1000)
            return router.complete(prompt, ignore_eos=True).status_code

        with ThreadPoolExecutor(8) as threads:
            assert Counter(threads.map(ask, range(30))) == {200: 30}
        until(lambda: router.state(prefills[1].url) == "down")
        outcomes = router.counts("prefills")
        # One counts as dropped if the answer begins before the prefill's own response is read: either may come first.
        assert outcomes["computed"] + outcomes["dropped"] > 15
        assert outcomes["lost"] + outcomes["moved"] + outcomes["unreachable"] > 0
        until(lambda: router.fleet.num_in_flight == 0)


@pytest.mark.slow
def test_the_three_commands_of_the_docs_serve_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    path = default_file()
    (address,) = free_addresses(1)
    shape = ("serve", path, "--port", "0", "--device", "cpu", "--kv-host-bytes", "64MiB", "--max-model-len", "512")
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", SECRET)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Command(*shape, "--kv-peer-listen", address))
        second = stack.enter_context(Command(*shape, "--kv-peer", address))
        prefill, decode = first.url(), second.url()
        flags = ("--backend", f"{prefill},prefill={address}", "--backend", decode, "--prefill-threshold", "64")
        router = stack.enter_context(Command("route", "--port", "0", *flags, "--tokenizer", path)).url()
        fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with httpx.Client(timeout=60) as http:
            until(lambda: [each["state"] for each in http.get(router + "/replicas").json()["replicas"]] == ["up", "up"])
            for number in range(5):  # on a busy machine a prompt may take longer than blocks are waited for
                text = f"{number}: speak of " + ", ".join(WORDS * 4) + "."
                fields["messages"] = [{"role": "user", "content": text}]
                ids, usage = streamed(http, router + "/v1/chat/completions", fields)
                expected, _ = streamed(http, prefill + "/v1/chat/completions", fields)
                assert ids == expected and len(ids) == 12
                if cached(usage) >= 128:
                    return
    raise AssertionError("the decode engine never read the prompt's blocks from its peer")
