"""The bodies of a request that is split: one token of the prompt for a prefill replica, and for the decode replica the
client's own with the place of the prompt's blocks in it.

The client's body is the truth about what is answered. The prefill replica's is built from the fields that make the
prompt, and no others: one that is missing here costs a hit in the cache, for blocks are found by their content.
"""

import msgspec
from msgspec import Raw

from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.router.placement.prompts import CHAT, COMPLETIONS, RENDERED

HINT = "kv_transfer_params"
BESIDE_THE_IDS = frozenset({"model", "cache_salt", "priority"})
MAKES_THE_PROMPT = BESIDE_THE_IDS | RENDERED | {"prompt", "tools", "documents", "truncate_prompt_tokens"}
ONE_TOKEN = {"max_tokens": Raw(b"1"), "temperature": Raw(b"0")}
NEEDS_EVERY_POSITION = ("prompt_logprobs", "echo")  # computed where they are answered; such a prompt skips the cache
ABSENT = Raw(b"null")


def is_splittable(path: str, body: bytes) -> bool:
    """Whether it matters only that the prompt is computed, and not where."""
    if path not in (CHAT, COMPLETIONS):
        return False
    try:
        fields = split_object(body)
    except HttpError:  # the replica says what is wrong
        return False
    return all(bytes(fields.get(name, ABSENT)) in (b"null", b"false") for name in NEEDS_EVERY_POSITION)


def prompt_of(body: bytes) -> bytes:
    """A request for the prompt of `body`, in the client's words."""
    fields = split_object(body)
    kept = {name: raw for name, raw in fields.items() if name in MAKES_THE_PROMPT}
    if bytes(fields.get("tool_choice", ABSENT)) == b'"none"':  # then the template hears of no tools
        kept.pop("tools", None)
    return msgspec.json.encode({**kept, **ONE_TOKEN})


def ids_of(form: bytes) -> bytes:
    """A completion of the ids in `form`, in that form."""
    text, ids = token_form.cut(form)
    kept = {name: raw for name, raw in split_object(text).items() if name in BESIDE_THE_IDS}
    return token_form.join(msgspec.json.encode({**kept, "prompt": None, **ONE_TOKEN}), ids)


def with_field(body: bytes, is_form: bool, name: str, value: object) -> bytes:
    """The request, or its form with ids, with this field, whatever it says of it itself."""
    text, ids = token_form.cut(body) if is_form else (body, b"")
    text = msgspec.json.encode({**split_object(text), name: value})
    return token_form.join(text, ids) if is_form else text
