"""What replicas say of a prompt's tokens, where the router cannot make them or must know that it makes the same.

`/tokenize` is vLLM's, and SGLang has it for prompts: a body as for a completion or a chat, `{"tokens": [...]}` back. The
ids serve to know what is cached where; the replica itself is sent the client's own bytes.
"""

import asyncio
from array import array

import msgspec

from penstock.engine.http.body import split_object
from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Replica
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.placement.prompts import CHAT, COMPLETIONS, Asked, Texts

# Of a request's body, what its tokens depend on.
FIELDS = {
    COMPLETIONS: frozenset({"model", "prompt", "add_special_tokens"}),
    CHAT: frozenset(
        {
            *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
            *("chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
        }
    ),
}
SAMPLE = "Grüße, 42 of them:\n\n\tone  two — three"


class _Tokens(msgspec.Struct):
    tokens: list[int]


_TOKENS = msgspec.json.Decoder(_Tokens)


async def ask_tokens(replica: Replica, body: bytes, timeout_s: float) -> bytes | None:
    """Packed as `Ids` are; None: it does not say."""
    try:
        status, answer = await fetch(replica.pool, "/tokenize", replica.key_line, timeout_s, body)
        return array("i", _TOKENS.decode(answer).tokens).tobytes() if status == 200 else None
    except (ConnectFailed, TimeoutError, msgspec.MsgspecError, OverflowError):
        return None


async def tokens_at_replica(fleet: Fleet, group: ReplicaGroup, path: str, body: bytes) -> bytes | None:
    """Of a request: asked of the replica with the fewest in flight."""
    able = [each for each in group.replicas.values() if fleet.is_available(each)]
    if path not in FIELDS or not able:
        return None
    try:
        fields = {name: raw for name, raw in split_object(body).items() if name in FIELDS[path]}
    except (ValueError, msgspec.MsgspecError):
        return None  # the replica says what is wrong
    replica = min(able, key=lambda each: each.num_in_flight)
    return await ask_tokens(replica, msgspec.json.encode(fields), fleet.config.patience.probe_timeout_s)


async def agrees(replica: Replica, texts: Texts, timeout_s: float) -> bool | None:
    """Whether the replica makes the tokens of a prompt and of a chat that we make; None: it has no `/tokenize`."""
    messages = [{"role": "user", "content": SAMPLE}]
    said: list[bool] = []
    for path, fields in ((COMPLETIONS, {"prompt": SAMPLE}), (CHAT, {"messages": messages})):
        body = msgspec.json.encode({"model": replica.models[0], **fields})
        theirs = await ask_tokens(replica, body, timeout_s)
        ours = await asyncio.to_thread(texts.ids, path, body, msgspec.json.decode(body, type=Asked))
        if theirs is not None and ours is not None:
            said.append(theirs == ours.packed)
    return all(said) if said else None
