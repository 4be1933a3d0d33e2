"""Two servers that share blocks, each with a core process of its own: prefill on one, answer on the other."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.oracle_engine import SECRET, is_connected, peer
from tests.support.peer_rig import free_addresses
from tests.support.running_server import Running, running, until

PROMPT = "a prompt that is computed elsewhere " * 20 + "."


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Running, Running, str]]:
    (address,) = free_addresses(1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PENSTOCK_KV_PEER_SECRET", SECRET)
        with running(peer(kv_peer_listen=address)) as prefill, running(peer(kv_peers=(address,))) as decode:
            yield prefill, decode, address


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_that_was_computed_on_one_server_is_read_by_the_other(pair: tuple[Running, Running, str]) -> None:
    prefill, decode, address = pair
    fields = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    until(lambda: is_connected(decode))
    first = prefill.complete(**fields | {"max_tokens": 1}).json()
    answer = decode.complete(**fields, kv_transfer_params={"peer": address, "wait_s": 30}).json()
    again = prefill.complete(**fields).json()
    assert cached(first) == 0 and cached(answer) == cached(again) == len(PROMPT) // 16 * 16
    assert answer["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    for wrong in ("169.254.169.254:80", "host", f"peer {address}"):
        refused = decode.complete(**fields, kv_transfer_params={"peer": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params.peer", wrong
        assert "not a --kv-peer of this engine" in refused.json()["error"]["message"]


def test_chat_takes_the_same_hint_or_an_empty_one(pair: tuple[Running, Running, str]) -> None:
    _, decode, address = pair
    for params in ({"peer": address}, {}):
        assert decode.chat(max_tokens=1, kv_transfer_params=params).status_code == 200
        assert decode.complete(max_tokens=1, kv_transfer_params=params).status_code == 200
    assert decode.chat(max_tokens=1, kv_transfer_params={"peer": "a:1"}).status_code == 400
