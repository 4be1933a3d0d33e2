"""Results of the offline API, with the names of vLLM."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from penstock.engine.front.answer import Answer, RequestMetrics, Update
from penstock.engine.front.values import Candidates, TokenText, candidates, embedding_of
from penstock.engine.messages import FinishReason

Shown = TypeVar("Shown")
Result = TypeVar("Result")


class CompletionOutput(msgspec.Struct):
    """One finished choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[Candidates] | None = None
    cumulative_logprob: float | None = None
    weights_versions: list[int] | None = None  # weights version of each token; None before any update

    def finished(self) -> bool:
        return self.finish_reason is not None


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]


class PooledRequestOutput(msgspec.Struct, Generic[Shown]):
    """The result of a prompt for `LLM.embed`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Shown
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    finished: bool = True


class RequestOutput(PooledRequestOutput[list[CompletionOutput]]):
    """A finished request, as `LLM.generate` returns it."""

    prompt_logprobs: list[Candidates | None] | None = None  # None for the first token, which is not predicted


class RequestsFailed(RuntimeError):
    """Some requests of a call failed while they ran. `results` has the results of the others, at their positions."""

    def __init__(self, errors: Sequence[str | None], results: Sequence[Any]) -> None:
        place, error = next((place, error) for place, error in enumerate(errors) if error is not None)
        more = sum(error is not None for error in errors) - 1
        others = f" ({more} more failed)" if more else ""
        super().__init__(f"prompt {place} of {len(errors)} failed: {error}{others}")
        self.errors, self.results = errors, results


def completed(answer: Answer, prompt: str | None, text: TokenText | None) -> RequestOutput:
    """Return the result of a finished answer whose updates have not been read yet."""
    entries, is_scored = answer.prompt_logprobs, answer.messages[0].sampling.prompt_logprobs is not None
    return RequestOutput(
        **_request(answer, prompt),
        outputs=[_completion(update, text) for update in answer.updates()],
        prompt_logprobs=[None, *(candidates(entry, text) for entry in entries or ())] if is_scored else None,
    )


def embedded(answer: Answer, prompt: str | None, normalize: bool) -> PooledRequestOutput[EmbeddingOutput]:
    assert answer.embedding is not None
    vector = embedding_of(answer.embedding, normalize)
    return PooledRequestOutput(**_request(answer, prompt), outputs=EmbeddingOutput(vector.tolist()))


def _request(answer: Answer, prompt: str | None) -> dict[str, Any]:
    return {
        "request_id": answer.request_id,
        "prompt": prompt,
        "prompt_token_ids": answer.prompt_token_ids,
        "num_cached_tokens": answer.num_cached_tokens or 0,
        "metrics": answer.metrics,
    }


def _completion(update: Update, text: TokenText | None) -> CompletionOutput:
    entries = update.logprobs
    return CompletionOutput(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=update.finish_reason,
        stop_reason=update.stop_reason,
        logprobs=None if entries is None else [candidates(entry, text) for entry in entries],
        cumulative_logprob=None if entries is None else sum(entry.values[0] for entry in entries),
        weights_versions=update.versions or None,
    )
