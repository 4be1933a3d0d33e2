"""Converts the core's outputs to updates: the `Answer` of a request, with a `Choice` for each of its sequences.

A choice decodes ids to text as they arrive, holds back text that may be the start of a stop string, and ends at the
first stop string. The server awaits an answer's updates as they arrive; the offline LLM reads all of them at the end.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from penstock.engine.messages import FinishReason, Output, Reuse, Submit
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.detokenize import TextStream
from penstock.engine.text.stop_strings import StopCondition, StopStrings
from penstock.executor.protocol import TokenLogprobs


class Update(msgspec.Struct):
    """The changes of one choice since the previous update."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for the model's own end
    versions: list[int] = []  # weights version of each token; []: the initial weights
    arrived_s: float = 0.0  # when its newest token arrived, since the request was submitted


def joined(updates: Sequence[Update]) -> Update:
    """Join consecutive updates of one choice, in time linear in their total length."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    has_versions = any(update.versions for update in updates)
    has_logprobs = any(update.logprobs is not None for update in updates)
    return msgspec.structs.replace(
        last,
        text="".join(update.text for update in updates),
        token_ids=[token for update in updates for token in update.token_ids],
        logprobs=[entry for update in updates for entry in update.logprobs or ()] if has_logprobs else None,
        versions=[each for update in updates for each in update.versions or [0] * len(update.token_ids)]
        if has_versions
        else [],
    )


class RequestMetrics(msgspec.Struct):
    """Times in seconds since the request was submitted."""

    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    accepted_drafts: int = 0  # tokens


class Choice:
    """One sequence of a request. Without a `stream` its updates have no text. Stop strings apply where `may_stop` returns
    true; None: everywhere."""

    def __init__(
        self, index: int, params: SamplingParams, stream: TextStream | None, may_stop: StopCondition | None = None
    ) -> None:
        self.index = index
        self.is_running = True
        self._stream = stream
        self._min_tokens = params.min_tokens
        self._user_stop_ids = frozenset(params.stop_token_ids or ())
        self._include_stop = params.include_stop_str_in_output
        stops = params.stop_strings if stream is not None else []
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._may_stop: StopCondition = may_stop or (lambda _text: True)
        self.num_tokens = 0  # so far, without those after a stop string

    def push(self, output: Output) -> Update:
        """Return the update for this output; an empty one after the end, since the core samples until it is told of the
        end."""
        update = Update(self.index)
        if not self.is_running:
            return update
        num_taken = len(output.tokens)
        if self._stream is not None:
            update.text, num_taken = self._text(self._stream, output)
        update.token_ids = output.tokens[:num_taken]
        self.num_tokens += num_taken
        if output.logprobs is not None:
            update.logprobs = output.logprobs[:num_taken]
        if output.weights_version:
            update.versions = [output.weights_version] * num_taken
        if self._stops is not None and self._stops.matched is not None:
            update.finish_reason, update.stop_reason = "stop", self._stops.matched
        elif output.finish_reason is not None:
            update.finish_reason = output.finish_reason
            update.stop_reason = output.stop_token if output.stop_token in self._user_stop_ids else None
        self.is_running = update.finish_reason is None
        return update

    def _text(self, stream: TextStream, output: Output) -> tuple[str, int]:
        """Return the new text, and the number of the output's tokens in it: tokens after a stop string are dropped."""
        # The token that ended the sequence is one of the tokens, but has no text.
        is_stopped = output.stop_token is not None and output.tokens[-1:] == [output.stop_token]
        visible = output.tokens[:-1] if is_stopped and not self._include_stop else output.tokens
        if self._stops is None:
            text = stream.push(visible)
            return (text if output.finish_reason is None else text + stream.flush()), len(output.tokens)
        parts = []
        for num_taken, token in enumerate(visible, 1):
            text = stream.push([token])
            may_stop = self._may_stop(text) and self.num_tokens + num_taken > self._min_tokens
            parts.append(self._stops.push(text, may_stop))
            if self._stops.matched is not None:
                return "".join(parts), num_taken
        if output.finish_reason is not None:
            is_past_minimum = self.num_tokens + len(visible) > self._min_tokens
            ended_well = output.finish_reason in ("stop", "length")
            text = stream.flush()
            parts.append(self._stops.push(text, self._may_stop(text) and ended_well and is_past_minimum))
            if self._stops.matched is None:
                parts.append(self._stops.flush())
        return "".join(parts), len(output.tokens)


class Answer:
    """The results of a request so far: receives the core's outputs and returns updates, at most one per choice at a
    time.

    Unread updates are merged, so a slow reader costs only the memory of its own answer. Iteration waits for updates
    until every choice has finished.
    """

    def __init__(self, messages: Sequence[Submit], choices: list[Choice], abort: Callable[[list[str]], None]) -> None:
        """`abort` ends sequences in the core, given the ids of their messages, one for every choice."""
        self.messages = messages
        self.choices = choices
        self.reuse: Reuse | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.embedding: bytes | None = None
        self.error: str | None = None  # error of the first choice that failed
        self.is_refused = False  # with an error: the request itself is invalid
        self.metrics = RequestMetrics()
        self.started_s = time.monotonic()
        # These concern the updates that were read:
        self.num_tokens = 0
        self.finish_reasons: list[FinishReason] = []  # of ended choices, in the order in which they ended
        self.read_s: float | None = None  # arrival of the newest of these tokens, since the start; set by the reader
        self._abort = abort
        self._unread: dict[int, list[Update]] = {}
        self._arrived = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.messages[0].request_id.rpartition(".")[0]

    @property
    def prompt_token_ids(self) -> list[int]:
        return array("i", self.messages[0].tokens).tolist()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.messages[0].tokens) // 4

    @property
    def num_cached_tokens(self) -> int | None:
        return None if self.reuse is None else self.reuse.num_cached_tokens

    @property
    def is_finished(self) -> bool:
        """True if no choice will have more text, even if the core has not confirmed it yet."""
        return not any(choice.is_running for choice in self.choices)

    def take(self, index: int, output: Output) -> None:
        """Process an output of one choice."""
        update = self.choices[index].push(output)
        if not (update.token_ids or update.text or update.finish_reason):
            return
        known, found = self.reuse, output.reuse
        if found is not None and (known is None or found.num_cached_tokens < known.num_cached_tokens):
            self.reuse = found  # not that of other choices, which hit blocks that the first has just computed
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        if self.error is None:
            self.error, self.is_refused = output.error, output.is_refusal
        metrics, now_s = self.metrics, time.monotonic() - self.started_s
        metrics.num_preemptions = max(metrics.num_preemptions, output.num_preemptions)
        metrics.accepted_drafts += output.accepted_drafts
        if metrics.queued_s is None:
            metrics.queued_s = output.queued_s
        if metrics.first_token_s is None and output.tokens:
            metrics.first_token_s = now_s
        update.arrived_s = now_s
        if update.finish_reason is not None:
            metrics.finished_s = now_s
        self._unread.setdefault(index, []).append(update)
        self._arrived.set()
        if update.finish_reason is not None and output.finish_reason is None:  # it ended at a stop string
            self._abort([output.request_id])

    def updates(self) -> list[Update]:
        """Return the updates since the last call, one per choice."""
        found = [joined(self._unread[index]) for index in sorted(self._unread)]
        self._unread = {}
        for update in found:
            self.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                self.finish_reasons.append(update.finish_reason)
        return found

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> list[Update]:
        await self.begun()
        if not self._unread:
            raise StopAsyncIteration
        return self.updates()

    async def begun(self) -> None:
        """Wait until there is an update to read, or there will be none."""
        while not self._unread and not self.is_finished:
            self._arrived.clear()
            await self._arrived.wait()

    def abort(self) -> None:
        """Abort the running choices; their end arrives as an update like any other."""
        self._abort([self.messages[c.index].request_id for c in self.choices if c.is_running])

    def check(self) -> None:
        """Assert every invariant."""
        num_running = sum(choice.is_running for choice in self.choices)
        num_choices = len(self.choices)
        assert len(self.messages) == num_choices
        assert (self.metrics.finished_s is None) == (num_running == num_choices)
        num_unread_ends = 0
        for index, updates in self._unread.items():
            ends = [update.finish_reason is not None for update in updates]
            assert ends and not any(ends[:-1]), "an update after the last"
            assert not ends[-1] or not self.choices[index].is_running
            num_unread_ends += ends[-1]
        assert num_running + num_unread_ends + len(self.finish_reasons) == num_choices, (
            "a choice ends in exactly one update"
        )


class OpenAnswers(dict[str, tuple[Answer, int]]):
    """The answers with running sequences: by the sequence's request id, its answer and which choice it is."""

    def add(self, answer: Answer) -> None:
        self.update({message.request_id: (answer, index) for index, message in enumerate(answer.messages)})

    def deliver(self, output: Output) -> Answer | None:
        """Pass an output to its answer and return the answer; return None if the answer has had its last output."""
        request_id = output.request_id
        entry = self.get(request_id) if output.finish_reason is None else self.pop(request_id, None)
        if entry is None:
            return None
        answer, index = entry
        answer.take(index, output)
        return answer

    def check(self) -> None:
        """Assert the invariants of every answer, and that its running sequences are listed."""
        for answer in {answer for answer, _ in self.values()}:
            answer.check()
            for message, choice in zip(answer.messages, answer.choices, strict=True):
                assert message.request_id in self or not choice.is_running
