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


# Older versions of the harness request no token.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_written"), [("ids", 1), ("one by one", 0), ("text", 1)])
def test_log_likelihoods_are_those_of_transformers(scored: Running, model: Any, kind: str, num_written: int) -> None:
    pairs = list(zip(map(ids, CONTEXTS), map(ids, CONTINUATIONS), strict=True))
    if kind == "ids":  # a continuation that the model itself would write counts as greedy
        context = pairs[0][0]
        written = model.generate(torch.tensor([context]), max_new_tokens=6, do_sample=False)[0, len(context) :]
        pairs.append((context, written.tolist()))
    whole = [context + continuation for context, continuation in pairs]
    prompts: list[Any] = [whole] if kind == "ids" else [[prompt] for prompt in whole]
    if kind == "text":
        prompts = [bytes(prompt).decode() for prompt in whole]
    answers = [scored.post("/v1/completions", request(each, max_tokens=num_written)).json() for each in prompts]
    choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda each: each["index"])]
    assert sum(answer["usage"]["completion_tokens"] for answer in answers) == num_written * len(pairs)
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        total, is_greedy = likelihood(choice["logprobs"], len(context), num_written)
        reference, was_greedy = expected(model, context, continuation)
        assert total == pytest.approx(reference, abs=1e-3) and is_greedy == was_greedy
    if kind == "ids":
        assert is_greedy
    assert choices[0]["text"].startswith(CONTEXTS[0] + CONTINUATIONS[0])


@pytest.mark.parametrize("num_written", [1, 0])
def test_prompts_up_to_the_limit_are_scored_and_longer_ones_refused(server: Running, num_written: int) -> None:
    longest = [1] * (server.engine.info.max_model_len - num_written)
    scored = server.post("/v1/completions", request([longest], max_tokens=num_written))
    assert scored.status_code == 200 and scored.json()["usage"]["total_tokens"] == len(longest) + num_written
    refused = server.post("/v1/completions", request([[*longest, 7]], max_tokens=num_written))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_the_harness_learns_the_tokenizer(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] and set(byte_tokenizer().special_tokens) <= set(info)
