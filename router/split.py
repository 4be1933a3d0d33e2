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

Fields = dict[str, Raw]  # of a request's body


def splittable(path: str, body: bytes, fields: Fields | None) -> Fields | None:
    """Return the request's fields if it matters only that its prompt is computed, and not where; else None. `fields`: as they
    were split before, if they were."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        fields = split_object(body) if fields is None else fields
    except HttpError:  # the replica says what is wrong
        return None
    needs_all = any(bytes(fields.get(name, ABSENT)) not in (b"null", b"false") for name in NEEDS_EVERY_POSITION)
    return None if needs_all else fields


def prompt_of(fields: Fields) -> bytes:
    """Return a request for the prompt alone, in the client's words."""
    kept = {name: raw for name, raw in fields.items() if name in MAKES_THE_PROMPT}
    if bytes(fields.get("tool_choice", ABSENT)) == b'"none"':  # then the template hears of no tools
        kept.pop("tools", None)
    return msgspec.json.encode({**kept, **ONE_TOKEN})


def ids_of(form: bytes) -> bytes:
    """A completion of the ids in `form`, in that form."""
    text, ids = token_form.cut(form)
    kept = {name: raw for name, raw in split_object(text).items() if name in BESIDE_THE_IDS}
    return token_form.join(msgspec.json.encode({**kept, "prompt": None, **ONE_TOKEN}), ids)


def with_hint(fields: Fields, hint: object) -> bytes:
    """Return the client's request with the place of its prompt's blocks in it."""
    return msgspec.json.encode({**fields, HINT: hint})


def form_with_hint(form: bytes, hint: object) -> bytes:
    """Return what `with_hint` returns, for the form with ids."""
    text, ids = token_form.cut(form)
    return token_form.join(with_hint(split_object(text), hint), ids)
