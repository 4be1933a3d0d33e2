"""The bodies of a request that is split: one token of the prompt for a prefill replica, and for the decode replica the
client's own body with the address of the prompt's blocks in it.

The client's body decides what is answered. The prefill replica's body is built from those fields alone that make the prompt. A
field that is missing there costs a hit in the cache and nothing else, because blocks are found by their content.
"""

import msgspec
from msgspec import Raw

from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.router.placement.prompts import CHAT, COMPLETIONS, RENDERED

HINT = "kv_transfer_params"
KEPT_WITH_IDS = frozenset({"model", "cache_salt", "priority"})
MAKES_THE_PROMPT = KEPT_WITH_IDS | RENDERED | {"prompt", "tools", "documents", "truncate_prompt_tokens"}
ONE_TOKEN = {"max_tokens": Raw(b"1"), "temperature": Raw(b"0")}
NEEDS_EVERY_POSITION = ("prompt_logprobs", "echo")  # computed where they are answered; such a prompt skips the cache
ABSENT = Raw(b"null")

Fields = dict[str, Raw]  # of a request's body


def splittable(path: str, body: bytes, fields: Fields | None) -> Fields | None:
    """Return the request's fields if another replica may compute its prompt, else None. `fields`: the body's fields if they
    are known already."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        fields = split_object(body) if fields is None else fields
    except HttpError:  # the replica says what is wrong
        return None
    needs_all = any(bytes(fields.get(name, ABSENT)) not in (b"null", b"false") for name in NEEDS_EVERY_POSITION)
    return None if needs_all else fields


def prompt_of(fields: Fields) -> bytes:
    """Return the body of a prefill request for a text prompt."""
    kept = {name: raw for name, raw in fields.items() if name in MAKES_THE_PROMPT}
    if bytes(fields.get("tool_choice", ABSENT)) == b'"none"':  # then the template is given no tools
        kept.pop("tools", None)
    return msgspec.json.encode({**kept, **ONE_TOKEN})


def ids_of(form: bytes) -> bytes:
    """Return the body of a prefill request for the token ids of `form`."""
    text, ids = token_form.cut(form)
    kept = {name: raw for name, raw in split_object(text).items() if name in KEPT_WITH_IDS}
    return token_form.join(msgspec.json.encode({**kept, "prompt": None, **ONE_TOKEN}), ids)


def with_hint(fields: Fields, hint: object) -> bytes:
    """Return the client's request with the address of its prompt's blocks in it."""
    return msgspec.json.encode({**fields, HINT: hint})


def form_with_hint(form: bytes, hint: object) -> bytes:
    """Return the same as `with_hint` for a body with token ids."""
    text, ids = token_form.cut(form)
    return token_form.join(with_hint(split_object(text), hint), ids)
