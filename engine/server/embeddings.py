"""POST /v1/embeddings."""

import base64

import msgspec
from msgspec import Raw

from penstock.engine.front.values import embedding_of
from penstock.engine.http.errors import HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.answer_writer import Json
from penstock.engine.server.answers import usage
from penstock.engine.server.call import Call
from penstock.engine.server.prompts import decode_inputs, in_thread_if, to_ids
from penstock.engine.server.requests import EmbeddingRequest
from penstock.engine.server.service import Service

MAX_INPUTS = 2048  # as in OpenAI's API
INLINE_FLOATS = 16 * 1024  # takes a millisecond; 2048 vectors of 4096 would block the event loop for a second

_PARAMS = SamplingParams(max_tokens=1, detokenize=False)


async def embeddings(service: Service, call: Call, body: bytes) -> Json:
    """Embed every input, by the hidden state of its last token or the mean over all of them."""
    request = service.accept(call, body, EmbeddingRequest)
    size = service.info.hidden_size
    if request.dimensions not in (None, size):
        what = f"{request.dimensions} given; this model has {size}, and they are not cut"
        raise InvalidRequest("dimensions", what)
    inputs = decode_inputs("input", request.input, MAX_INPUTS, service.info, num_answered=0)
    pooling = request.pooling or service.config.pooling
    with service.admit(len(inputs), "input"):
        prompts = await to_ids("input", inputs, service, request, num_answered=0)
        service.generate(call, request, prompts, _PARAMS, pooling=pooling)
    for answer in call.answers:
        async for updates in answer:
            service.seen(answer, updates)
    if any(answer.embedding is None for answer in call.answers):  # ended by a pause or a drain
        raise HttpError(503, "the embedding was ended before it was complete")
    vectors = await in_thread_if(
        size * len(inputs) > INLINE_FLOATS, lambda: [_vector(answer.embedding, request) for answer in call.answers]
    )
    data = [{"index": index, "embedding": vector, "object": "embedding"} for index, vector in enumerate(vectors)]
    names = {"id": f"embd-{call.id}", "created": call.created, "model": call.model}
    return {**names, "object": "list", "data": data, "usage": usage(call.answers)}


def _vector(embedding: bytes | None, request: EmbeddingRequest) -> Raw:
    """Return the JSON of the vector, as numbers or as base64 of little-endian float32, normalized unless `normalize` is
    false. Encoding all vectors of a reply in one call would hold the GIL, in a thread too."""
    assert embedding is not None, "an answer without a vector is refused before"
    vector = embedding_of(embedding, request.normalize is not False)
    is_base64 = request.encoding_format == "base64"
    return Raw(msgspec.json.encode(base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()))
