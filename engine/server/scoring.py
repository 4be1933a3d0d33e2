"""POST /classify, /score and /rerank: what a model with labels says of texts, or of pairs of them."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from penstock.engine.front.labels import asking_for, labels_of, pair_prompts, scored_labels_of, shown
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.answers import gather, usage
from penstock.engine.server.call import Call
from penstock.engine.server.embeddings import MAX_INPUTS
from penstock.engine.server.prompts import decode_inputs, in_thread_if, to_ids
from penstock.engine.server.requests import ClassifyRequest, LabelRequest, RerankRequest, ScoreRequest, TextObject
from penstock.engine.server.responses import Classified, Labelled, Ranked, Reranked, Score
from penstock.engine.server.service import Service
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.executor.protocol import LabelInfo

_CLASSIFY = msgspec.json.Decoder(ClassifyRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


async def classify(service: Service, call: Call, body: bytes) -> Labelled[Classified]:
    """The labels of every input, with their probabilities."""
    request = service.accept(call, body, _CLASSIFY)
    labels = labels_of(service.info)
    inputs = decode_inputs("input", request.input, MAX_INPUTS, service.info)
    found = await _numbers(service, call, request, "input", inputs, labels)
    data = [
        Classified(index, labels.names[values.index(max(values))], values, len(values))
        for index, values in enumerate(found)
    ]
    return Labelled(f"classify-{call.id}", call.created, call.model, data, usage(call.answers, 0))


async def score(service: Service, call: Call, body: bytes) -> Labelled[Score]:
    """How well the two texts of every pair go together: one text with each of many, or each with its own."""
    request = service.accept(call, body, _SCORE)
    named = {"text_1": request.text_1, "text_2": request.text_2}
    if request.queries is not None or request.documents is not None:
        named = {name: each for name, each in named.items() if each is not None}
        named |= {"queries": request.queries, "documents": request.documents}
    given = {name: _texts(each) for name, each in named.items() if each is not None}
    if len(given) != 2 or len(named) != 2:
        raise InvalidRequest("text_1", f"{', '.join(given) or 'nothing'} given; text_1 and text_2 are expected")
    (one, first), (other, second) = given.items()
    found = await _of_pairs(service, call, request, first, second, (one, other))
    data = [Score(index, value) for index, value in enumerate(found)]
    return Labelled(f"score-{call.id}", call.created, call.model, data, usage(call.answers, 0))


async def rerank(service: Service, call: Call, body: bytes) -> Reranked:
    """The documents, those that go best with the query first."""
    request = service.accept(call, body, _RERANK)
    texts = _texts(request.documents)
    found = await _of_pairs(service, call, request, [request.query], texts, ("query", "documents"))
    order = sorted(range(len(found)), key=lambda index: -found[index])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [Ranked(index, found[index], TextObject(texts[index]) if shows else UNSET) for index in order]
    return Reranked(f"rerank-{call.id}", call.model, results, usage(call.answers))


async def _of_pairs(
    service: Service, call: Call, request: LabelRequest, first: list[str], second: list[str], fields: tuple[str, str]
) -> list[float]:
    labels, template = scored_labels_of(service.info), service.template
    if len(second) > MAX_INPUTS:
        raise InvalidRequest(fields[1], f"{len(second)} texts; 1 to {MAX_INPUTS} are allowed")
    is_long = len(second) * sum(map(len, first)) + sum(map(len, second)) > INLINE_CHARS
    texts, adds_special = await in_thread_if(is_long, lambda: pair_prompts(template, first, second, fields))
    if request.add_special_tokens is None:
        request.add_special_tokens = adds_special
    return [value for (value,) in await _numbers(service, call, request, fields[1], texts, labels)]


async def _numbers(
    service: Service,
    call: Call,
    request: LabelRequest,
    field: str,
    inputs: Sequence[str | list[int]],
    labels: LabelInfo,
) -> list[list[float]]:
    params = asking_for(labels, service.tokenizer)
    with service.admit(len(inputs)):
        prompts = await to_ids(field, inputs, service, request.add_special_tokens, request.truncate_prompt_tokens)
        service.generate(call, request, prompts, params, pooling="labels")
    for answer in call.answers:
        await gather(service, answer)
    return [shown(labels, answer.embedding or b"", request.use_activation is not False) for answer in call.answers]


def _texts(given: str | TextObject | Sequence[str | TextObject]) -> list[str]:
    many = [given] if isinstance(given, str | TextObject) else given
    return [each if isinstance(each, str) else each.text for each in many]
