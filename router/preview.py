"""`POST /route`: explains a routing decision without sending the request.

It says where the request would go, how much of the prompt is cached there, and how long the first token should take. It is
for callers that proxy requests themselves. Nothing is charged, so two calls at once get the same answer.
"""

from typing import TYPE_CHECKING, Any

from penstock.engine.http.body import decode
from penstock.engine.http.errors import HttpError, clip
from penstock.router.http.heads import ClientRequest
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PROMPTS, Asked

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
    name, rows = group.placement.preview(prepared.prompt, prepared.num_tokens, session, group.not_for(asked.model))
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
