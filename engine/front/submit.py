"""From a user's request to the core's messages: what the server and the offline LLM check and build alike."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.cache.tiers.base import peer_name
from penstock.engine.messages import Submit
from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.executor.protocol import ModelInfo

Pooling = Literal["last", "mean"]


class KvTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the prompt's blocks are, or will be: one of the engine's own `--kv-peer`, and how long to wait for them."""

    peer: Annotated[str, Meta(min_length=1, max_length=256)]
    wait_s: Annotated[float, Meta(ge=0, le=600)] = 2.0


def token_bytes(tokens: Sequence[int], vocab_size: int, field: str = "prompt") -> bytes:
    """Token ids as the core takes them; ids outside the vocabulary are refused."""
    if not tokens:
        raise InvalidRequest(field, "the prompt is empty; at least one token is needed")
    try:
        low, high = min(tokens), max(tokens)
    except TypeError:
        raise InvalidRequest(field, "a list of token ids may hold integers only") from None
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(field, f"token id {str(bad)[:24]} is outside the vocabulary, 0 to {vocab_size - 1}")
    try:
        return array("i", tokens).tobytes()
    except TypeError:
        raise InvalidRequest(field, "a list of token ids may hold integers only") from None


def check_length(num_tokens: int, info: ModelInfo, field: str = "prompt") -> None:
    """A prompt must leave room for one token."""
    if num_tokens >= info.max_model_len:
        raise InvalidRequest(
            field,
            f"{num_tokens} tokens; the context holds {info.max_model_len} with the answer, "
            f"so at most {info.max_model_len - 1} can be given",
        )


def check_room(num_tokens: int, max_tokens: int | None, info: ModelInfo, field: str = "max_tokens") -> None:
    """An answer of the length asked for must fit behind the prompt."""
    room = info.max_model_len - num_tokens
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            field,
            f"{max_tokens} asked for; the prompt has {num_tokens} tokens and the context holds "
            f"{info.max_model_len}, so at most {room} can follow",
        )


def submissions(
    request_id: str,
    prompt: bytes,
    params: SamplingParams,
    info: ModelInfo,
    eos_ids: Iterable[int],
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    pooling: Pooling | None = None,
    skip_prefix_cache: bool = False,
    grammar: str | None = None,
    kv_transfer: KvTransfer | None = None,
) -> list[Submit]:
    """One message per choice, named `request_id.index`. The choices find each other's prompt in the prefix cache."""
    assert (params.structured_outputs is None) == (grammar is None), (
        "engine/front/grammar_check.py makes one of the other"
    )
    peer = None if kv_transfer is None else peer_name(kv_transfer.peer)
    if kv_transfer is not None and peer not in info.stores:  # nobody but the operator says whom this engine talks to
        raise InvalidRequest("kv_transfer_params.peer", f"{kv_transfer.peer[:64]!r} is none of this engine's --kv-peer")
    room = info.max_model_len - len(prompt) // 4
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return [
        Submit(
            f"{request_id}.{index}",
            prompt,
            params.sampling(eos_ids, index),
            max_tokens,
            priority,
            cache_salt,
            None,
            pooling,
            skip_prefix_cache,
            grammar,
            peer,
            0.0 if kv_transfer is None else kv_transfer.wait_s,
        )
        for index in range(params.n)
    ]
