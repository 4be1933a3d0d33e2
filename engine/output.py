"""From the core's token ids to the text a user sees: one `Choice` per sequence, shared by the offline LLM and the server.

A choice turns ids into text as they come, holds back what may still become a stop string, and cuts at the
first stop string found. It says when the core must be told to stop early.
"""

from typing import Protocol

import msgspec

from penstock.engine.messages import FinishReason, Output
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.protocol import TokenLogprobs


class TextStream(Protocol):
    """Incremental detokenizing of one sequence (engine/text/tokenizer.py has the real one)."""

    def push(self, ids: list[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character are kept back."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end of the sequence."""
        ...


class Update(msgspec.Struct):
    """What is new about one choice. Updates of a choice can be merged: text and lists are concatenated."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for the model's own end
    error: str | None = None

    def merge(self, later: "Update") -> None:
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


class CompletionOutput(msgspec.Struct):
    """One finished choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


class RequestMetrics(msgspec.Struct):
    """Times in seconds since the request was submitted."""

    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


class RequestOutput(msgspec.Struct):
    """A finished request, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
