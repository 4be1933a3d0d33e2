"""POST /v1/embeddings, and /classify, /score and /rerank, which run a classification model on texts or pairs of texts."""

import base64
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from penstock.engine.front.labels import asking_for, labels_of, shown
from penstock.engine.front.results import embedding_of
from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.engine.server.answers import Json, gather, usage
from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import HandledRoute
from penstock.engine.server.prompts import decode_inputs, in_thread_if, to_ids
from penstock.engine.server.requests import EmbeddingRequest, PromptRequest
from penstock.engine.server.service import Service
from penstock.engine.text.prompt import INLINE_CHARS, pair_prompts
from penstock.executor.protocol import LabelInfo, Pooled

MAX_INPUTS = 2048  # as in OpenAI's API
INLINE_FLOATS = 16 * 1024  # takes a millisecond; 2048 vectors of 4096 would block the event loop for a second
MAX_CHARS = 1 << 24  # total length of all pairs; a text that is in every pair counts once per pair

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
    found = await pooled(service, call, request, "input", inputs, _PARAMS, pooling)
    vectors = await in_thread_if(
        size * len(inputs) > INLINE_FLOATS, lambda: [_vector(embedding, request) for embedding in found]
    )
    data = [{"index": index, "embedding": vector, "object": "embedding"} for index, vector in enumerate(vectors)]
    return _reply(call, "embd", usage(call.answers), data)


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
        prompts = await to_ids(field, inputs, service, request, num_answered=0)
        service.generate(call, request, prompts, params, pooling=pooling)
    for answer in call.answers:
        await gather(service, answer)
    return [answer.embedding or b"" for answer in call.answers]  # never empty: a failure would have been raised


def _vector(embedding: bytes, request: EmbeddingRequest) -> Raw:
    """Return the JSON of the vector, as numbers or as base64 of little-endian float32, normalized unless `normalize` is
    false. Encoding all vectors of a reply in one call would hold the GIL, in a thread too."""
    vector = embedding_of(embedding, request.normalize is not False)
    is_base64 = request.encoding_format == "base64"
    return Raw(msgspec.json.encode(base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()))


class TextObject(msgspec.Struct, forbid_unknown_fields=True):
    text: str


Texts = str | TextObject | list[str | TextObject]


class ClassifyRequest(PromptRequest, kw_only=True):
    """POST /classify"""

    input: Raw


class ScoreRequest(PromptRequest, kw_only=True):
    """POST /score, /v1/score"""

    text_1: Texts
    text_2: Texts


class RerankRequest(PromptRequest, kw_only=True):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    query: str
    documents: list[str | TextObject]
    top_n: Annotated[int, Meta(ge=0)] = 0  # 0: all
    return_documents: bool | None = None


async def classify(service: Service, call: Call, body: bytes) -> Json:
    """Classify every input: its most likely label, and the probabilities of all labels."""
    request = service.accept(call, body, ClassifyRequest)
    labels = labels_of(service.info)
    inputs = decode_inputs("input", request.input, MAX_INPUTS, service.info, num_answered=0)
    found = await _numbers(service, call, request, "input", inputs, labels)
    data = [
        {"index": index, "label": labels.names[values.index(max(values))], "probs": values, "num_classes": len(values)}
        for index, values in enumerate(found)
    ]
    return _reply(call, "classify", usage(call.answers, 0), data)


async def score(service: Service, call: Call, body: bytes) -> Json:
    """Score how well the two texts of every pair go together: one text with each of many, or each with its own."""
    request = service.accept(call, body, ScoreRequest)
    first, second = _texts(request.text_1), _texts(request.text_2)
    found = await _of_pairs(service, call, request, first, second, ("text_1", "text_2"))
    data = [{"index": index, "score": value, "object": "score"} for index, value in enumerate(found)]
    return _reply(call, "score", usage(call.answers, 0), data)


async def rerank(service: Service, call: Call, body: bytes) -> Json:
    """Rank the documents by how well they go with the query."""
    request = service.accept(call, body, RerankRequest)
    texts = _texts(request.documents)
    found = await _of_pairs(service, call, request, [request.query], texts, ("query", "documents"))
    order = sorted(range(len(found)), key=lambda index: -found[index])[: request.top_n or None]
    results: list[Json] = [{"index": index, "relevance_score": found[index]} for index in order]
    for result in results if request.return_documents is not False else ():
        result["document"] = {"text": texts[result["index"]]}
    return {"id": f"rerank-{call.id}", "model": call.model, "results": results, "usage": usage(call.answers)}


def _reply(call: Call, prefix: str, used: Json, data: list[Json]) -> Json:
    names = {"id": f"{prefix}-{call.id}", "created": call.created, "model": call.model}
    return {**names, "object": "list", "data": data, "usage": used}


async def _of_pairs(
    service: Service, call: Call, request: PromptRequest, first: list[str], second: list[str], fields: tuple[str, str]
) -> list[float]:
    labels, template = labels_of(service.info, is_scored=True), service.template
    size = sum(map(len, first)) * (len(second) if len(first) == 1 else 1) + sum(map(len, second))
    if len(second) > MAX_INPUTS or size > MAX_CHARS:
        what = f"{len(second)} pairs of {size} characters in all; at most {MAX_INPUTS} of {MAX_CHARS} are allowed"
        raise InvalidRequest(fields[1], what)
    is_long = size > INLINE_CHARS
    texts, adds_special = await in_thread_if(is_long, lambda: pair_prompts(template, first, second, fields))
    if request.add_special_tokens is None:
        request.add_special_tokens = adds_special
    return [value for (value,) in await _numbers(service, call, request, fields[1], texts, labels)]


async def _numbers(
    service: Service,
    call: Call,
    request: PromptRequest,
    field: str,
    inputs: Sequence[str | list[int]],
    labels: LabelInfo,
) -> list[list[float]]:
    found = await pooled(service, call, request, field, inputs, asking_for(labels, service.tokenizer), "labels")
    return await in_thread_if(
        len(found) * len(labels.names) > INLINE_FLOATS,
        lambda: [shown(labels, numbers) for numbers in found],
    )


def _texts(given: str | TextObject | Sequence[str | TextObject]) -> list[str]:
    many = [given] if isinstance(given, str | TextObject) else given
    return [each if isinstance(each, str) else each.text for each in many]


ROUTES = (
    HandledRoute("/classify", classify),
    *(HandledRoute(path, score) for path in ("/score", "/v1/score")),
    *(HandledRoute(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)
