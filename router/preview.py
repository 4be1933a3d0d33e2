"""`POST /route`: where a request would go, what is cached of it there, and how long its first token should take.

For who proxies himself, or wants to see why. Nothing is sent and nothing charged: two that ask at once get the same
answer.
"""

from typing import TYPE_CHECKING, Any

from penstock.engine.http.body import decode
from penstock.engine.http.errors import HttpError, clip
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PROMPTS, Asked, length_of

if TYPE_CHECKING:
    from penstock.router.app import RouterApp


class RouteQuestion(Asked):
    """The body of a completion, a chat or an agents' API; `path` where the body does not say which."""

    path: str | None = None


async def preview(app: "RouterApp", request: ClientRequest) -> dict[str, Any]:
    """Raises HttpError as for the request itself."""
    asked = decode(RouteQuestion, request.body)
    path = asked.path or (CHAT if bytes(asked.messages) else COMPLETIONS)
    if path not in PROMPTS:
        raise HttpError(400, f"path: {clip(path)!r} is not one of {', '.join(PROMPTS)}", param="path")
    group = app.fleet.group_of(asked.model)
    prepared = await app.prepare(path, request.body, asked, group)
    session = request.session.decode("latin-1")[:256] if request.session else asked.session
    length = length_of(path, asked, prepared)
    name, rows = group.placement.preview(
        prepared.prompt, prepared.num_tokens, session, group.not_for(asked.model, group.aside, length)
    )
    if name is None:
        raise app.fleet.refusal(group, asked.model, length)
    chosen = next(row for row in rows if row["url"] == name)
    return {
        "replica": name,
        "prompt_tokens": prepared.num_tokens,
        "matched_tokens": chosen["cached_tokens"],
        "predicted_first_token_s": chosen["predicted_first_token_s"],
        "replicas": rows,
    }
