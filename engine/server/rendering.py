"""POST /v1/completions/render and /v1/chat/completions/render: the token ids of a request, without running the model.

The answer has vLLM's names, which the endpoint pickers of inference gateways read. A request is checked and tokenized by
the code that otherwise answers it, so the same ones are refused, except for a grammar that does not compile and an unknown
peer.
"""

from array import array
from typing import Any

import msgspec

from penstock.engine.server import chat, completions
from penstock.engine.server.call import Call
from penstock.engine.server.requests import GenerateRequest
from penstock.engine.server.service import Service


async def render_chat(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Return what a chat would submit to the engine."""
    call.rendered = []
    request, _ = await chat.submit(service, call, body)
    return _rendered(service, call, request, chat.ChatWriter.PREFIX)[0]


async def render_completions(service: Service, call: Call, body: bytes) -> list[dict[str, Any]]:
    """Return what a completion would submit to the engine: an object for each prompt."""
    call.rendered = []
    request, _ = await completions.submit(service, call, body)
    return _rendered(service, call, request, completions.CompletionWriter.PREFIX)


def _rendered(service: Service, call: Call, request: GenerateRequest, prefix: str) -> list[dict[str, Any]]:
    found = []
    for place, (prompt, params) in enumerate(call.rendered or ()):
        ids = array("i", prompt).tolist()
        room = service.info.max_model_len - len(ids)
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        rendered = {
            "request_id": f"{prefix}{call.id}-{place}",
            "token_ids": ids,
            "features": None,  # of images and the like
            "sampling_params": msgspec.structs.asdict(params) | {"max_tokens": length},
            "model": call.model,
            "stream": bool(request.stream),
            "stream_options": request.stream_options,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
        }
        found.append(rendered)
    return found
