"""One prepared request: what the client sent, what the placement needs of it, and the forms in which replicas get it.

The application prepares a request once (prompts.py), and the exchange sends it, perhaps to one replica after the other.
"""

from typing import Any

import msgspec
from msgspec import Raw

from penstock.engine.http.token_form import CONTENT_TYPE, REPORT_HEADER
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.placement import Prompt

NOTHING = Raw()

_JSON = REPORT_HEADER + b": cached-tokens\r\ncontent-type: application/json\r\n"
_WITH_IDS = REPORT_HEADER + b": cached-tokens\r\ncontent-type: %b\r\n" % CONTENT_TYPE


class RequestFields(msgspec.Struct):
    """The fields of a request that the router reads."""

    model: str | None = None
    prompt: Raw = NOTHING
    messages: Raw = NOTHING
    instructions: Raw = NOTHING
    input: Raw = NOTHING
    system: Raw = NOTHING
    cache_salt: str | None = None
    session_id: Any = None
    prompt_cache_key: Any = None
    kv_transfer_params: Raw = NOTHING
    previous_response_id: Any = None  # of a response that a replica stores
    store: Any = None


class PreparedRequest(msgspec.Struct, frozen=True, gc=False):
    """The request and its routing data. The exchange frees it, with the body, at the first byte of the answer."""

    request: ClientRequest
    parsed: RequestFields
    client_key: bytes  # the header with the client's own key, for replicas that need none of ours
    prompt: Prompt | None
    num_tokens: int
    body_with_ids: bytes | None = None
    text_digest: str | None = None  # of the tokenizer and template that the ids were made with
    fields: dict[str, Raw] | None = None  # the body's, if it was split

    @property
    def session(self) -> str | None:
        """Return the client's session: a header, or one of two fields."""
        named = self.request.session.decode("latin-1"), self.parsed.session_id, self.parsed.prompt_cache_key
        return next((each[:256] for each in named if isinstance(each, str) and each), None)

    def has_ids_for(self, text_digest: str | None) -> bool:
        """Return whether a replica with this tokenizer and chat template gets token ids: they must be the router's."""
        return self.body_with_ids is not None and text_digest == self.text_digest

    def form_for(self, text_digest: str | None, key_line: bytes) -> tuple[bytes, bytes]:
        """Return the header lines and the body for a replica. `key_line`: the header with the replica's own key, if any."""
        request, form, kind = self.request, self.body_with_ids, _WITH_IDS
        if form is None or not self.has_ids_for(text_digest):
            form, kind = request.body, _JSON
        return request.lines + kind + (key_line or self.client_key), form
