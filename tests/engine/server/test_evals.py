"""Evaluation harnesses: the very requests that lm_eval 0.4.13 sends (`local-completions`, `local-chat-completions`), to a
small model of random weights, and its arithmetic over the answers, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_engine import byte_tokenizer
from tests.support.running_server import MODEL, Running, engine_of, running
from tests.support.small_models import SIZES, random_model

LIMIT = 96
CONTEXTS = ["The capital of France is", "Two plus two is", "The sun rises in the"]
CONTINUATIONS = [" Paris", " four", " east of every kitchen"]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("LlamaConfig", {**SIZES, "vocab_size": 300})


@pytest.fixture(scope="module")
def scored(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    with running(engine_of(folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=LIMIT)) as started:
        yield started


def request(prompt: Any, **fields: Any) -> dict[str, Any]:
    always = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": MODEL, "prompt": prompt, **always, **fields}


def ids(text: str) -> list[int]:
    return list(text.encode())


def likelihood(logprobs: dict[str, Any], num_context: int, num_written: int) -> tuple[float, bool]:
    """Return the sum that the harness computes, and whether each token was the likeliest, without context and sampled tokens."""
    part = slice(num_context, len(logprobs["tokens"]) - num_written)
    chosen, tops = logprobs["token_logprobs"][part], logprobs["top_logprobs"][part]
    return sum(chosen), all(value == max(top.values()) for value, top in zip(chosen, tops, strict=True))


@torch.no_grad()
def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    scores = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    chosen = scores.gather(1, torch.tensor(continuation)[:, None])
    return chosen.sum().item(), bool((scores.argmax(-1) == torch.tensor(continuation)).all())


# Older versions of the harness ask for no token.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_written"), [("ids", 1), ("one by one", 0), ("text", 1)])
def test_log_likelihoods_are_those_of_transformers(scored: Running, model: Any, kind: str, num_written: int) -> None:
    both = list(zip(map(ids, CONTEXTS), map(ids, CONTINUATIONS), strict=True))
    whole = [context + continuation for context, continuation in both]
    kinds: dict[str, list[Any]] = {
        "ids": [whole],
        "one by one": [[prompt] for prompt in whole],
        "text": [bytes(prompt).decode() for prompt in whole],
    }
    answers = [scored.post("/v1/completions", request(batch, max_tokens=num_written)).json() for batch in kinds[kind]]
    choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda each: each["index"])]
    assert sum(answer["usage"]["completion_tokens"] for answer in answers) == num_written * len(both)
    for choice, (context, continuation) in zip(choices, both, strict=True):
        total, is_greedy = likelihood(choice["logprobs"], len(context), num_written)
        reference, was_greedy = expected(model, context, continuation)
        assert total == pytest.approx(reference, abs=1e-3) and is_greedy == was_greedy
        assert choice["text"].startswith(bytes(context + continuation).decode())


@pytest.mark.slow
def test_a_continuation_that_the_model_would_write_counts_as_greedy(scored: Running, model: Any) -> None:
    context = ids(CONTEXTS[0])
    own = model.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False)[0, len(context) :].tolist()
    (choice,) = scored.post("/v1/completions", request([context + own])).json()["choices"]
    total, is_greedy = likelihood(choice["logprobs"], len(context), 1)
    assert is_greedy and total == pytest.approx(expected(model, context, own)[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_written", [1, 0])
def test_prompts_up_to_the_limit_are_scored_and_longer_ones_refused(
    scored: Running, model: Any, num_written: int
) -> None:
    longest = [(7 * place) % 256 for place in range(LIMIT - num_written)]
    (choice,) = scored.post("/v1/completions", request([longest], max_tokens=num_written)).json()["choices"]
    total, _ = likelihood(choice["logprobs"], 1, num_written)
    assert total == pytest.approx(expected(model, longest[:1], longest[1:])[0], abs=1e-2)
    refused = scored.post("/v1/completions", request([[*longest, 7]], max_tokens=num_written))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_the_harness_may_tokenize_here(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] and set(byte_tokenizer().special_tokens) <= set(info)
    body = {"prompt": "abc", "add_special_tokens": False}
    plain = server.post("/tokenize", body).json()
    assert (plain["tokens"], plain["token_strs"]) == (ids("abc"), None)
    assert server.post("/tokenize", {**body, "return_token_strs": True}).json()["token_strs"] == ["a", "b", "c"]
