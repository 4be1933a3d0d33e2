"""/classify, /score and /rerank over small classifiers of random weights, against transformers; and the same offline."""

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from benchmarks.export import save_tokenizer

from penstock import LLM
from penstock.engine.front.labels import shown
from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.engine.server import scoring
from penstock.engine.server.call import Call
from penstock.engine.text.template import ChatTemplate
from penstock.executor.protocol import LabelInfo
from tests.support.fake_engine import byte_tokenizer
from tests.support.refusals import table
from tests.support.running_server import MODEL, Running, engine_of, running
from tests.support.small_models import SIZES, randomize

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris.", "Bananas are yellow and grow on trees that are no trees.", "France has a capital"]
RERANKER = (
    "<q>{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    "<d>{{ (messages | selectattr('role', 'eq', 'document') | first).content }}<yes?>"
)


def save(folder: Path, kind: str = "Qwen3", **fields: Any) -> Any:
    """A random model with a head of labels, or with one for the vocabulary if it has none."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"vocab_size": 300, "head_dim": 16}, **fields)
    auto = transformers.AutoModelForSequenceClassification if fields else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    randomize(model)
    model.eval().save_pretrained(folder)
    save_tokenizer(byte_tokenizer(), folder)
    return model


@torch.no_grad()
def logits(model: Any, text: str) -> torch.Tensor:
    return torch.as_tensor(model(torch.tensor([list(text.encode())])).logits[0])


def offline(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_bytes=2**22, max_model_len=200, **options)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scorer")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save(folder, num_labels=1)


@pytest.fixture(scope="module")
def scores(model: Any) -> list[float]:
    return [sigmoid(logits(model, QUERY + text).item()) for text in DOCUMENTS]


@pytest.fixture(scope="module")
def server(folder: Path, model: Any) -> Iterator[Running]:
    with running(engine_of(folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=200)) as started:
        yield started


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_of_several(server: Running, scores: list[float], path: str) -> None:
    answer = server.post(path, {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert answer["object"] == "list" and answer["model"] == MODEL and answer["id"].startswith("score-")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2] and answer["data"][0]["object"] == "score"
    assert [each["score"] for each in answer["data"]] == pytest.approx(scores, rel=1e-3)
    assert answer["usage"]["prompt_tokens"] == sum(len(QUERY + text) for text in DOCUMENTS)


def test_texts_are_scored_each_with_its_own(server: Running, scores: list[float]) -> None:
    answer = server.post("/score", {"text_1": [QUERY] * 3, "text_2": [{"text": text} for text in DOCUMENTS]}).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(scores, rel=1e-3)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(server: Running, scores: list[float], path: str) -> None:
    order = sorted(range(3), key=lambda index: -scores[index])
    answer = server.post(path, {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}).json()
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(sorted(scores)[::-1], rel=1e-3)
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    assert answer["usage"]["total_tokens"] == sum(len(QUERY + text) for text in DOCUMENTS)
    best = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    (only,) = server.post(path, best).json()["results"]
    assert only["index"] == order[0] and "document" not in only


def test_a_query_s_blocks_are_computed_once_for_all_its_documents(server: Running) -> None:
    body = {"query": "a long question " * 6, "documents": ["one", "two", "three"]}
    server.post("/rerank", body)
    usage = server.post("/rerank", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 3 * 80


def test_inputs_are_classified(server: Running, model: Any) -> None:
    answer = server.post("/classify", {"input": ["a text", "another"]}).json()
    assert answer["id"].startswith("classify-") and [each["index"] for each in answer["data"]] == [0, 1]
    for each, text in zip(answer["data"], ("a text", "another"), strict=True):
        assert each["label"] == "LABEL_0" and each["num_classes"] == 1
        assert each["probs"] == pytest.approx([sigmoid(logits(model, text).item())], rel=1e-3)
    by_ids = server.post("/classify", {"input": [list(b"a text")]}).json()
    assert by_ids["data"][0] == answer["data"][0]


@pytest.mark.parametrize(("path", "body", "param"), table(__file__, "scoring"))
def test_what_cannot_be_scored_is_refused_by_name(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    refused = server.post(path, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_offline_it_scores_and_classifies_and_writes_nothing(folder: Path, model: Any, scores: list[float]) -> None:
    with offline(folder) as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert [each.outputs.score for each in found] == pytest.approx(scores, rel=1e-3)
        assert [each.prompt_token_ids for each in found] == [list((QUERY + text).encode()) for text in DOCUMENTS]
        assert llm.classify("a text", use_tqdm=False)[0].outputs.num_classes == 1
        with pytest.raises(InvalidRequest, match="classif"):
            llm.generate("a", SamplingParams(), use_tqdm=False)


def test_labels_have_their_names_and_add_up_to_one(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", num_labels=3)
    with offline(tmp_path, hf_overrides={"id2label": {"0": "bad", "1": "fair", "2": "good"}}) as llm:
        assert llm.info.labels is not None and llm.info.labels.names == ("bad", "fair", "good")
        (result,) = llm.classify(["a text"], use_tqdm=False)
        assert result.outputs.probs == pytest.approx(logits(model, "a text").softmax(-1).tolist(), rel=1e-3)
        with pytest.raises(InvalidRequest, match="3 labels"):
            llm.score("a", "b")


def test_a_reranker_answers_with_yes_or_no_behind_its_own_template(tmp_path: Path) -> None:
    """As Qwen3-Reranker does; the small vocabulary has `n` and `y` for the two words."""
    model = save(tmp_path)
    asked = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    with offline(tmp_path, hf_overrides=asked) as llm:
        llm.template = ChatTemplate(RERANKER)
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        for each, text in zip(found, DOCUMENTS, strict=True):
            no, yes = logits(model, f"<q>{QUERY}<d>{text}<yes?>")[-1, list(b"ny")].tolist()
            assert each.outputs.score == pytest.approx(sigmoid(yes - no), rel=1e-3)
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)  # it still writes
    never = {"classifier_from_token": ["never", "y"]}
    with offline(tmp_path, hf_overrides=never) as llm, pytest.raises(InvalidRequest, match="'never' is no token"):
        llm.score("a", "b")


@pytest.mark.timeout(60)  # with a look at all labels for each of them it takes minutes
def test_many_labels_cost_what_one_does_each() -> None:
    probabilities = shown(LabelInfo(names=("",) * 200_000, activation="softmax"), bytes(4 * 200_000))
    assert len(probabilities) == 200_000 and probabilities[-1] == pytest.approx(1 / 200_000)


def test_many_numbers_do_not_hold_up_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = LabelInfo(names=("",) * 20_000, activation="softmax")
    threads = []

    async def pooled(*_: Any) -> list[bytes]:
        return [b""]

    def noting(*_: Any) -> list[float]:
        threads.append(threading.current_thread())
        return [1.0]

    monkeypatch.setattr(scoring, "pooled", pooled)
    monkeypatch.setattr(scoring, "shown", noting)
    service: Any = SimpleNamespace(tokenizer=None)
    request = scoring.ClassifyRequest(input=msgspec.Raw(b"null"))
    assert asyncio.run(scoring._numbers(service, Call(()), request, "input", ["a"], labels)) == [[1.0]]
    assert threads != [] and threading.current_thread() not in threads


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"classifier_from_token": ["n", "y"]}])
def test_two_ranks_score_as_one_does(tmp_path: Path, overrides: dict[str, Any]) -> None:
    fields: dict[str, Any] = {} if overrides else {"num_labels": 1}
    save(tmp_path, **fields)
    found = []
    for ranks in (1, 2):
        with offline(tmp_path, hf_overrides=overrides, tensor_parallel_size=ranks) as llm:
            found.append([each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
