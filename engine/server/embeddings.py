"""POST /v1/embeddings: returns one vector per input."""

import base64
from array import array
from collections.abc import Sequence

from penstock.engine.front.results import unit_length
from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.engine.server.answers import gather, usage
from penstock.engine.server.call import Call
from penstock.engine.server.prompts import decode_inputs, in_thread_if, to_ids
from penstock.engine.server.requests import EmbeddingRequest, PromptRequest
from penstock.engine.server.responses import Embedding, Embeddings
from penstock.engine.server.service import Service
from penstock.executor.protocol import Pooled

MAX_INPUTS = 2048  # as in OpenAI's API
INLINE_FLOATS = 16 * 1024  # takes a millisecond; 2048 vectors of 4096 would block the event loop for a second

_PARAMS = SamplingParams(max_tokens=1, detokenize=False)


async def embeddings(service: Service, call: Call, body: bytes) -> Embeddings:
    """Embed every input, by the hidden state of its last token or the mean over all of them."""
    request = service.accept(call, body, EmbeddingRequest)
    size = service.info.hidden_size
    if request.dimensions not in (None, size):
        what = f"{request.dimensions} given; this model has {size}, and they are not cut"
        raise InvalidRequest("dimensions", what)
    inputs = decode_inputs("input", request.input, MAX_INPUTS, service.info)
    pooling = request.pooling or service.config.pooling
    found = await pooled(service, call, request, "input", inputs, _PARAMS, pooling)
    shown = await in_thread_if(
        size * len(inputs) > INLINE_FLOATS, lambda: [_shown(embedding, request) for embedding in found]
    )
    return Embeddings(
        data=[Embedding(index, vector) for index, vector in enumerate(shown)],
        model=call.model,
        usage=usage(call.answers),
        id=f"embd-{call.id}",
    )


async def pooled(
    service: Service,
    call: Call,
    request: PromptRequest,
    field: str,
    inputs: Sequence[str | list[int]],
    params: SamplingParams,
    pooling: Pooled,
) -> list[bytes]:
    """Run the model on every input and return its vector, as little-endian float32."""
    with service.admit(len(inputs)):
        prompts = await to_ids(field, inputs, service, request.add_special_tokens, request.truncate_prompt_tokens, 0)
        service.generate(call, request, prompts, params, pooling=pooling)
    for answer in call.answers:
        await gather(service, answer)
    return [answer.embedding or b"" for answer in call.answers]  # never empty: a failure would have been raised


def _shown(embedding: bytes, request: EmbeddingRequest) -> list[float] | str:
    """Return the vector as numbers or as base64 of little-endian float32, normalized unless `normalize` is false."""
    vector = array("f", embedding)
    if request.normalize is not False:
        vector = unit_length(vector)
    return base64.b64encode(vector.tobytes()).decode() if request.encoding_format == "base64" else vector.tolist()
