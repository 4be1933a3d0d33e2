"""`POST /route`: where a request would go, what is cached of it there, and how long its first token should take.

For who proxies himself, or wants to see why. Nothing is sent and nothing charged: two that ask at once get the same
answer.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engine.http.body import decode
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PROMPTS, Asked

if TYPE_CHECKING:
    from penstock.router.app import RouterApp


class RouteQuestion(msgspec.Struct):
    """The body of a completion, a chat or an agents' API; `path` where the body does not say which."""

    path: str | None = None
    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


_QUESTION = msgspec.json.Decoder(RouteQuestion)
_ASKED = msgspec.json.Decoder(Asked)


async def preview(app: "RouterApp", request: ClientRequest) -> dict[str, Any]:
    """Raises HttpError as for the request itself."""
    wanted, asked = decode(_QUESTION, request.body), decode(_ASKED, request.body)
    path = wanted.path or (CHAT if bytes(wanted.messages) else COMPLETIONS)
    if path not in PROMPTS:
        path = COMPLETIONS
    group = app.fleet.group_of(asked.model)
    prepared = await app.prepare(path, request.body, asked, group)
    session = request.session.decode("latin-1")[:256] if request.session else asked.session
    name, rows = group.placement.preview(
        prepared.prompt, prepared.num_tokens, session, group.not_for(asked.model, group.aside)
    )
    if name is None:
        raise app.fleet.refusal(group, asked.model)
    chosen = next(row for row in rows if row["url"] == name)
    return {
        "replica": name,
        "prompt_tokens": prepared.num_tokens,
        "matched_tokens": chosen["cached_tokens"],
        "predicted_first_token_s": chosen["predicted_first_token_s"],
        "replicas": rows,
    }
