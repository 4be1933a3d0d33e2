"""Checks that an engine of another kind makes the same tokens of a text as --tokenizer does.

`/tokenize` is vLLM's, and SGLang has it for prompts: a body as for a completion or a chat, `{"tokens": [...]}` back.
"""

import asyncio
import contextlib
from array import array

import msgspec

from penstock.engine.http.body import split_object
from penstock.router.fleet.replica import Replica
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PromptReader, RequestFields

SAMPLE = "Grüße, 42 of them:\n\n\tone  two — three"


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def tokenizes_alike(replica: Replica, prompts: PromptReader, timeout_s: float) -> bool | None:
    """Return whether the replica makes our tokens of a prompt and of a chat; None if it has no `/tokenize`."""
    messages = [{"role": "user", "content": SAMPLE}]
    is_same: list[bool] = []
    model = next(iter(replica.models), None)  # it has none any more if it was removed meanwhile
    for path, fields in ((COMPLETIONS, {"prompt": SAMPLE}), (CHAT, {"messages": messages})):
        body = msgspec.json.encode({"model": model, **fields})
        parsed = msgspec.json.decode(body, type=RequestFields)
        ours = await asyncio.to_thread(prompts.ids, path, body, parsed, split_object(body), is_ours=False)
        with contextlib.suppress(ConnectFailed, TimeoutError, msgspec.MsgspecError, OverflowError, RecursionError):
            status, answer = await fetch(replica.pool, "/tokenize", replica.key_line, timeout_s, body)
            if status == 200 and ours is not None:
                is_same.append(array("i", msgspec.json.decode(answer, type=_Tokens).tokens).tobytes() == ours[0])
    return all(is_same) if is_same else None
