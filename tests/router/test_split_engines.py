"""Split requests through real engines: they make the tokens of a single engine, and the blocks did move."""

import contextlib
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.default_file import default_file
from tests.support.oracle_engine import SECRET, is_connected, peer
from tests.support.peer_rig import free_addresses
from tests.support.programs import Command
from tests.support.router_fleet import RunningRouter, mock_replicas, running_router, until
from tests.support.running_server import Running, running

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
