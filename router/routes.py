"""The routes of a router: those that it answers itself, and those that it passes to a replica."""

from penstock.router.http.heads import ClientRequest
from penstock.router.placement.prompts import CHAT, COMPLETIONS, EMBEDDINGS, PROMPTS, RequestFields

RESPONSES = "/v1/responses"
STORED = "/v1/responses/"  # before the id of a response that a replica stores
COUNTS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/responses/compact")  # without an answer
TOKENS = ("/tokenize", "/detokenize", f"{CHAT}/render", f"{COMPLETIONS}/render")  # of a text; nothing is computed
PROXIED = frozenset({*PROMPTS, EMBEDDINGS, *COUNTS, *TOKENS})
MODEL = "/v1/models/"  # before the name of a model
OWN = frozenset({"/", "/health", "/ping", "/ready", "/metrics", "/version", "/replicas", "/v1/models"})
METHODS = {"/replicas": (b"GET", b"HEAD", b"POST", b"DELETE")}  # of the others: GET and HEAD
PROBED = OWN - {"/", "/replicas", "/v1/models"}
OPEN = frozenset((method, path) for method in (b"GET", b"HEAD") for path in ("/", "/health", "/ready"))  # need no key


def is_proxied(path: str) -> bool:
    return path in PROXIED or path.startswith(STORED)


def route_of(request: ClientRequest) -> str:
    """Return the name of the request's route for metrics, lines and spans: one of a fixed set."""
    path = request.path
    if path in OWN or path in PROXIED:
        return path
    return next((each for each in (STORED, MODEL) if path.startswith(each)), "unmatched")


def is_repeatable(request: ClientRequest, parsed: RequestFields) -> bool:
    """Return whether the request may be sent again although a replica may have read it: not if that could store a second
    response, or delete or cancel one twice."""
    if request.path in PROXIED:
        return request.path != RESPONSES or parsed.store is False
    return request.method == b"GET"


def stored_id(path: str, parsed: RequestFields) -> str | None:
    """Return the id of the stored response that a request names in its path or in `previous_response_id`, else None."""
    if path not in PROXIED:
        return path.removeprefix(STORED).partition("/")[0]
    previous = parsed.previous_response_id
    return previous if isinstance(previous, str) else None
