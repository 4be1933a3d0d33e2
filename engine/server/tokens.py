"""POST routes that do not run the model: /tokenize, /detokenize, /reset_prefix_cache, and loading of adapters."""

from array import array
from typing import Any

from penstock.engine.front.submit import token_bytes
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.engine.server.call import Call
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.prompts import apply_verbosity, decode_ids, in_thread_if, render, to_ids
from penstock.engine.server.requests import DetokenizeRequest, NoFields, TokenizeRequest, parse, parse_control
from penstock.engine.server.service import Service
from penstock.engine.text.prompt import INLINE_CHARS, RENDERING


async def tokenize(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Return the token ids of `prompt`, or of `messages` under the chat template, and their strings on request."""
    request = parse(body, TokenizeRequest, call.ignored)
    service.check_model(request.model)
    has_messages = bytes(request.messages) not in (b"", b"null")
    if (request.prompt is not None) == has_messages:
        raise InvalidRequest("prompt", "exactly one of prompt and messages is needed")
    for name in () if has_messages else (*RENDERING, "verbosity", "tools", "tool_choice"):
        if getattr(request, name) is not None:
            raise InvalidRequest(name, "only messages have a template; prompt is given")
    # Tokenizing costs as much here as for a completion, so it is subject to the same admission.
    with service.admit(1):
        text = request.prompt
        if text is None:
            conversation = Conversation(len(body), call.paths)
            conversation.read(request.messages, service.info, call.ignored)
            apply_verbosity(request, service, call.ignored)
            text = await render(request, conversation, service)
        field = "messages" if has_messages else "prompt"
        (packed,) = await to_ids(field, [text], service, request, num_answered=0)
    ids = array("i", packed).tolist()
    strings = None
    if request.return_token_strs:
        as_string = service.tokenizer.backend.id_to_token
        strings = await in_thread_if(len(ids) > INLINE_CHARS, lambda: [*map(as_string, ids)])
    return {"count": len(ids), "max_model_len": service.info.max_model_len, "tokens": ids, "token_strs": strings}


async def detokenize(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Return the text of `tokens`."""
    request = parse(body, DetokenizeRequest, call.ignored)
    service.check_model(request.model)
    with service.admit(1):
        ids = decode_ids("tokens", request.tokens, service.info)
        if not ids:
            return {"prompt": ""}
        token_bytes(ids, service.info.vocab_size, "tokens")
        skips = bool(request.skip_special_tokens)
        text = await in_thread_if(
            len(ids) > INLINE_CHARS, lambda: service.tokenizer.decode(ids, skip_special_tokens=skips)
        )
    return {"prompt": text}


async def reset_prefix_cache(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Forget all cached content, in all tiers. 409 while requests run or transfers are in flight."""
    parse_control(NoFields, call.query, body)
    await service.engine.control("reset_prefix_cache")
    return {"status": "reset"}


async def load_adapter(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Serve the PEFT adapter in a folder of the server under a name of its own, beside the model."""
    request = parse_control(LoadAdapterRequest, call.query, body)
    await service.adapters.load(request.lora_name, request.lora_path, bool(request.load_inplace))
    return {"status": f"adapter {request.lora_name!r} is loaded"}


async def unload_adapter(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Accept no more requests for an adapter; requests in flight finish."""
    request = parse_control(UnloadAdapterRequest, call.query, body)
    service.adapters.unload(request.lora_name)
    return {"status": f"adapter {request.lora_name!r} is unloaded"}
