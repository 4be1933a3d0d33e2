"""The client's request in the forms in which replicas get it."""

import msgspec

from penstock.engine.http.token_form import CONTENT_TYPE, REPORT_HEADER
from penstock.router.fleet.replica import Replica
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.prompts import RequestFields, Routable
from penstock.router.routes import PROXIED, RESPONSES, STORED

_JSON = REPORT_HEADER + b": cached-tokens\r\ncontent-type: application/json\r\n"
_WITH_IDS = REPORT_HEADER + b": cached-tokens\r\ncontent-type: %b\r\n" % CONTENT_TYPE


class RoutedRequest(msgspec.Struct, frozen=True, gc=False):
    """The request and its routing data. The exchange frees it, with the body, at the first byte of the answer."""

    request: ClientRequest
    parsed: RequestFields
    routable: Routable
    client_key: bytes  # the header with the client's own key, for replicas that need none of ours
    owner_line: bytes  # the header by which replicas tell the router's clients apart

    @property
    def session(self) -> str | None:
        """Return the client's session: a header, or one of two fields."""
        named = self.request.session.decode("latin-1"), self.parsed.session_id, self.parsed.prompt_cache_key
        return next((each[:256] for each in named if isinstance(each, str) and each), None)

    @property
    def is_repeatable(self) -> bool:
        """Return whether the request may be sent again although a replica may have read it: not if that could store a second
        response, or delete or cancel one twice."""
        if self.request.path in PROXIED:
            return self.request.path != RESPONSES or self.parsed.store is False
        return self.request.method == b"GET"

    def has_ids_for(self, replica: Replica) -> bool:
        """Return whether the replica gets token ids: it must have the same tokenizer and chat template as the router."""
        routable = self.routable
        return routable.body_with_ids is not None and replica.text_digest == routable.text_digest

    def form_for(self, replica: Replica) -> tuple[bytes, bytes]:
        """Return the header lines and the body for the replica."""
        request, form, kind = self.request, self.routable.body_with_ids, _WITH_IDS
        if form is None or not self.has_ids_for(replica):
            form, kind = request.body, _JSON
        return request.lines + kind + self.owner_line + (replica.key_line or self.client_key), form


def stored_id(path: str, parsed: RequestFields) -> str | None:
    """Return the id of the stored response that a request names in its path or in `previous_response_id`, else None."""
    if path not in PROXIED:
        return path.removeprefix(STORED).partition("/")[0]
    given = parsed.previous_response_id
    return given if isinstance(given, str) else None
