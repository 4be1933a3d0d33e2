"""POST /v1/embeddings: one vector for each input."""

import base64
from array import array

import msgspec

from penstock.engine.front.answer import unit_length
from penstock.engine.http.errors import HttpError
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.answers import usage
from penstock.engine.server.call import Answering, Call
from penstock.engine.server.prompts import decode_inputs, to_ids
from penstock.engine.server.requests import EmbeddingRequest, parse
from penstock.engine.server.responses import Embedding, Embeddings
from penstock.engine.server.service import Service

MAX_INPUTS = 2048  # as at OpenAI

_DECODER = msgspec.json.Decoder(EmbeddingRequest)
_PARAMS = SamplingParams(max_tokens=1, detokenize=False)


async def embeddings(service: Service, call: Call, body: bytes) -> Embeddings:
    """Embed every input, by the hidden state of its last token or the mean over all of them."""
    request = parse(body, _DECODER)
    model = service.check_model(request.model)
    call.note_client_id(request.request_id)
    size = service.info.hidden_size
    if request.dimensions not in (None, size):
        raise HttpError(
            400,
            f"dimensions: {request.dimensions} given; this model has {size}, and they are not cut",
            param="dimensions",
        )
    inputs = decode_inputs("input", request.input, MAX_INPUTS, service.info)
    with service.admit(len(inputs)):
        prompts = await to_ids(
            "input",
            inputs,
            service.tokenizer,
            service.info,
            add_special_tokens=request.add_special_tokens is not False,
            truncate_to=request.truncate_prompt_tokens,
        )
        answers = service.generate(
            call,
            prompts,
            _PARAMS,
            pooling=request.pooling or service.config.pooling,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
        )
    vectors = [await _vector(answer) for answer in answers]
    generations = [answer.generation for answer in answers]
    shown = [_shown(vector, request) for vector in vectors]
    return Embeddings(
        data=[Embedding(index, vector) for index, vector in enumerate(shown)],
        model=model,
        usage=usage(generations),
        id=f"embd-{call.id}",
    )


async def _vector(answer: Answering) -> "array[float]":
    async for _ in answer:
        pass
    assert answer.generation.embedding is not None  # an error would have been raised
    return array("f", answer.generation.embedding)


def _shown(vector: "array[float]", request: EmbeddingRequest) -> list[float] | str:
    """The vector at unit length unless asked otherwise, as numbers or as base64 of little-endian float32."""
    if request.normalize is not False:
        vector = unit_length(vector)
    return base64.b64encode(vector.tobytes()).decode() if request.encoding_format == "base64" else vector.tolist()
