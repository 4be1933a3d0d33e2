"""From the core's token ids to the text a user sees: one `Choice` per sequence, shared by the offline LLM and the server.

A choice turns ids into text as they come, holds back what may still become a stop string, and cuts at the
first stop string found. It says when the core must be told to stop early.
"""

import math
from array import array
from collections.abc import Callable, Sequence

import msgspec

from penstock.engine.messages import FinishReason, Output
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.detokenize import TextStream
from penstock.engine.text.stop_strings import StopStrings
from penstock.executor.protocol import TokenLogprobs


class Update(msgspec.Struct):
    """What is new about one choice since the update before."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for the model's own end
    error: str | None = None
    is_refusal: bool = False  # with an error: the request itself is at fault


def joined(updates: Sequence[Update]) -> Update:
    """Consecutive updates of one choice as one; linear in their length, however many there are."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    has_logprobs = any(update.logprobs is not None for update in updates)
    return Update(
        last.index,
        "".join(update.text for update in updates),
        [token for update in updates for token in update.token_ids],
        [entry for update in updates for entry in update.logprobs or ()] if has_logprobs else None,
        last.finish_reason,
        last.stop_reason,
        last.error,
        last.is_refusal,
    )


class Logprob(msgspec.Struct, frozen=True):
    """A token that was, or might have been, at one position. The names are those of vLLM."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None = None  # None without a tokenizer


Candidates = dict[int, Logprob]  # by token id: the one that is there first, then the most likely ones in order


def candidates(entry: TokenLogprobs, text: Callable[[int], str] | None) -> Candidates:
    """`text` says how a token reads."""
    ranks = (entry.rank, *range(1, len(entry.ids)))
    found: Candidates = {}
    for token_id, value, rank in zip(entry.ids, entry.values, ranks, strict=True):
        found.setdefault(token_id, Logprob(value, rank, None if text is None else text(token_id)))
    return found


class CompletionOutput(msgspec.Struct):
    """One finished choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[Candidates] | None = None
    cumulative_logprob: float | None = None


class RequestMetrics(msgspec.Struct):
    """Times in seconds since the request was submitted."""

    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0

    def note(self, output: Output, now_s: float) -> None:
        """Take in what the core says with one output."""
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if self.queued_s is None:
            self.queued_s = output.queued_s
        if self.first_token_s is None and output.tokens:
            self.first_token_s = now_s


class RequestOutput(msgspec.Struct):
    """A finished request, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Candidates | None] | None = None  # None for the first token, which nothing predicts
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)


def unit_length(vector: "array[float]") -> "array[float]":
    """The same direction; a vector of zeros stays."""
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return array("f", [value / length for value in vector])


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]


class EmbeddingRequestOutput(msgspec.Struct):
    """An embedded prompt, as `LLM.embed` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)

    @property
    def embedding(self) -> list[float]:
        return self.outputs.embedding


class Choice:
    """One sequence of a request, from the core's outputs to updates with text.

    `stream` is None where no text is wanted. After `finished`, later outputs (of tokens that the core sampled
    before it learned of the end) add nothing.
    """

    def __init__(self, index: int, params: SamplingParams, stream: TextStream | None) -> None:
        self.index = index
        self.finished = False
        self.must_abort = False  # the text ended at a stop string while the core still runs the sequence
        self._stream = stream
        self._min_tokens = params.min_tokens
        self._user_stop_ids = frozenset(params.stop_token_ids or ())
        self._include_stop = params.include_stop_str_in_output
        stops = params.stop_strings if stream is not None else []
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._num_tokens = 0

    def push(self, output: Output) -> Update:
        """What the user is told of this output."""
        update = Update(self.index)
        if self.finished:
            return update
        num_taken = len(output.tokens)
        if self._stream is not None:
            update.text, num_taken = self._text(self._stream, output)
        update.token_ids = output.tokens[:num_taken]
        self._num_tokens += num_taken
        if output.logprobs is not None:
            update.logprobs = output.logprobs[:num_taken]
        if self._stops is not None and self._stops.found is not None:
            update.finish_reason, update.stop_reason = "stop", self._stops.found
            self.must_abort = output.finish_reason is None
        elif output.finish_reason is not None:
            update.finish_reason, update.error = output.finish_reason, output.error
            update.is_refusal = output.is_refusal
            update.stop_reason = output.stop_token if output.stop_token in self._user_stop_ids else None
        self.finished = update.finish_reason is not None
        return update

    def _text(self, stream: TextStream, output: Output) -> tuple[str, int]:
        """The new text, and how many of the output's tokens it took: those behind a stop string are dropped."""
        # The token that ended the sequence is listed among the tokens, but it is no text.
        is_silent = (
            output.stop_token is not None and not self._include_stop and output.tokens[-1:] == [output.stop_token]
        )
        spoken = output.tokens[:-1] if is_silent else output.tokens
        if self._stops is None:
            text = stream.push(spoken)
            return (text if output.finish_reason is None else text + stream.flush()), len(output.tokens)
        parts = []
        for num_taken, token in enumerate(spoken, 1):
            parts.append(self._stops.push(stream.push([token]), self._num_tokens + num_taken > self._min_tokens))
            if self._stops.found is not None:
                return "".join(parts), num_taken
        if output.finish_reason is not None:
            is_past_minimum = self._num_tokens + len(spoken) > self._min_tokens
            ended_well = output.finish_reason in ("stop", "length")
            parts.append(self._stops.push(stream.flush(), ended_well and is_past_minimum))
            if self._stops.found is None:
                parts.append(self._stops.flush())
        return "".join(parts), len(output.tokens)
