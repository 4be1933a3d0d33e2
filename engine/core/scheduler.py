"""Decides what the next step computes. Pure state and integers: no tensors, no text, no I/O, no clock of its own.

There is no prefill and no decode: a request has positions that are ready to be computed, and each step hands
out as many as one token budget allows. Requests that run come first; then waiting ones are admitted, in
order, while their whole prompt fits. Steps are planned ahead of their results: a plan assumes that every
row in flight delivers its token, and `apply` corrects what turns out otherwise (an end of sequence). A request
that drafts may follow is not planned ahead: what they are depends on its last token (engine/core/drafts.py).
"""

from array import array
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cache.keys import namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.kv import Kv
from penstock.engine.core.request import Request, WaitingQueue
from penstock.engine.messages import FinishReason, Output, Stats, Submit
from penstock.executor.protocol import (
    NOTHING_LEFT,
    Admission,
    ModelInfo,
    Row,
    Step,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:  # half of the core, for those that have tiers, drafts, grammars or several groups of layers
    from penstock.engine.core.drafts import Drafter, Sent
    from penstock.engine.core.tiering import Tiering
    from penstock.engine.grammar.matcher import Matcher


MOST_PASSED = 64  # requests that wait for a place for their adapter, and that others may go before


class InFlight(NamedTuple):
    """A step in flight: what `apply` needs to read its result."""

    step: Step  # its first rows are those of the requests, then come those of drafts
    requests: list[Request]
    sent: "dict[int, Sent]"  # drafts, by the index of the request


class StepPlan:
    """A step while it is made: what is left of its tokens, and the rows of what has been given some."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[Request, Row] = {}
        self.has_preempted = False


class Scheduler:
    """Owns every request, the block pool and the slots; changed by one thread only."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo, clock: Callable[[], float]) -> None:
        self.config = config
        self.info = info
        self.block_size = info.block_size
        self.pool = BlockPool(info.num_blocks)
        self.requests: dict[str, Request] = {}  # all that have not ended, by id
        self.running: dict[Request, None] = {}  # in order of admission
        self.waiting = WaitingQueue(config.patience_s)
        self.held: dict[Request, None] = {}  # their grammars are being compiled
        self.in_flight: deque[InFlight] = deque()  # the oldest step first
        self._stats = Stats()  # its counters; the gauges are taken when they are asked for
        self.kv = Kv(self.pool, info, config.max_num_batched_tokens, config.enable_prefix_caching, self._stats)
        self.tiers: Tiering | None = None
        if info.host_slots:
            from penstock.engine.core import tiering

            saves_per_step = -(-config.max_num_batched_tokens // info.block_size)  # as many as a step can fill
            self.tiers = self.kv.tiers = tiering.Tiering(info, self.pool, saves_per_step, self.kv)
        self._drafter: Drafter | None = None
        if (speculative := config.speculative_config) is not None:
            from penstock.engine.core import drafts

            self._drafter = drafts.Drafter(
                speculative, self.pool, info.block_size, config.max_num_seqs, self._stats, self.kv
            )
        self._clock = clock
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_submitted = 0
        self._weights_version = 0

    def submit(self, message: Submit, matcher: "Matcher | None" = None) -> Output | None:
        """Queue a sequence. A refusal is its terminal output. One with a grammar and no matcher is held until
        `release` or `end`; it counts as waiting, keeps its place of arrival and can be aborted."""
        if message.request_id in self.requests:
            return refusal(message, "request_id: a request with this id is running")
        if self.num_free_places == 0:
            return refusal(message, f"the queue is full ({len(self.requests)} sequences are in flight)")
        tokens, most = array("i", message.tokens), self.info.max_model_len
        most_given = most - (message.pooling is None and message.max_tokens > 0)
        if not 0 < len(tokens) <= most_given:
            return refusal(message, f"prompt: {len(tokens)} tokens; 1 to {most_given} can run")
        # What is in the cache has no logits and no hidden states to report any more.
        needs_all = message.sampling.prompt_logprobs is not None or message.pooling == "mean"
        request = Request(
            message,
            self._num_submitted,
            self._clock(),
            tokens,
            min(message.max_tokens, most - len(tokens)),
            namespace_root(model=self.info.fingerprint, adapter=message.adapter, salt=message.cache_salt),
            needs_all or not self.config.enable_prefix_caching,
            matcher,
        )
        request.weights_version = self._weights_version
        self.kv.extend_keys(request)
        if self.tiers is not None and not self.has_work():
            self.tiers.wake()
        self._num_submitted += 1
        self.requests[message.request_id] = request
        if message.grammar is not None and matcher is None:
            self.held[request] = None
        else:
            self.waiting.add(request)
        return None

    def release(self, request: Request, matcher: "Matcher") -> None:
        """The grammar of a held request is compiled."""
        del self.held[request]
        request.matcher = matcher
        self.waiting.add(request)

    def end(self, request: Request, reason: FinishReason, error: str | None = None, is_refusal: bool = False) -> Output:
        """End a request in any state. An error is its own fault only if `is_refusal`."""
        self._retire(request)
        return request.output([], reason, error=error, is_refusal=is_refusal)

    def abort(self, request_id: str) -> Output | None:
        """None when it has ended already."""
        request = self.requests.get(request_id)
        return None if request is None else self.end(request, "abort")

    @property
    def num_free_places(self) -> int:
        """How many more sequences `submit` takes."""
        return self.config.max_sequences - len(self.requests)

    def has_work(self) -> bool:
        """Also without requests: steps in flight, which may carry transfers."""
        return bool(self.requests) or bool(self.in_flight)

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed before a result arrives."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self.tiers is not None:
            self.tiers.begin_step(self.waiting, len(self.running), self._clock())
        for request in list(self.running):
            if plan.budget == 0:
                break
            if request.slot >= 0:  # else it was preempted a moment ago, for an earlier one
                self._continue(request, plan)
        for request in plan.rows:
            self.kv.register(request)
        admissions = [] if plan.has_preempted else self._admit(plan)
        rows, sent = self._with_drafts(plan.rows)
        if self.kv.has_state:
            for request in plan.rows:
                self.kv.keep_checkpoints(request)
        # Not before: an admission of this very step must not be handed a block that a row of it writes.
        self.kv.drop_replaced()
        transfers = None if self.tiers is None else self.tiers.end_step()
        # A transfer's end is reported with a step's result only; a step in flight will bring it.
        must_ask = self.tiers is not None and not self.in_flight and (self.tiers.is_stale or not self.tiers.is_idle)
        if not rows and not admissions and transfers is None and not must_ask:
            return None
        self._stats.num_steps += 1
        step = Step(self._stats.num_steps, admissions, rows, transfers)
        self.in_flight.append(InFlight(step, list(plan.rows), sent))
        return step

    def _continue(self, request: Request, plan: StepPlan) -> None:
        """Plan the next row of a request that runs, if it has one."""
        ready = request.num_ready
        count = min(ready - request.num_scheduled, plan.budget)
        if count == 0 or request.is_restoring or not request.wants_more:
            return
        if request.drafts and request.num_pending:
            return
        kv = self.kv
        if not kv.is_plain:
            count = kv.begin_row(request, count)
        end = request.num_scheduled + count
        missing = -(-end // self.block_size) - len(request.blocks)
        if not kv.is_plain:
            missing = kv.num_missing(request, end)
        if missing > self.pool.num_free and not self._make_room(request, missing, plan):
            return
        if missing > 0 or kv.has_state:
            kv.extend(request, end)
        plan.rows[request] = request.row(count, samples=end == ready)
        plan.budget -= count

    def _make_room(self, request: Request, missing: int, plan: StepPlan) -> bool:
        """Preempt others, and the request itself where none is left; whether it runs still."""
        while missing > self.pool.num_free and request.slot >= 0:
            victim = self._victim()
            plan.has_preempted = True
            dropped = plan.rows.pop(victim, None)
            if dropped is not None:  # planned a moment ago, and not sent after all
                victim.num_pending -= dropped.sample
                plan.budget += dropped.count
            self._preempt(victim)
        return request.slot >= 0

    def _with_drafts(self, planned: dict[Request, Row]) -> "tuple[list[Row], dict[int, Sent]]":
        """Return the step's rows, followed by rows of draft tokens within what is left of the token budget."""
        if self._drafter is None:
            return [*planned.values()], {}
        budget = self.config.max_num_batched_tokens - sum(row.count for row in planned.values())
        # Requests that run take a block each before long, and those that wait take all there are.
        spare = 0 if self.waiting else max(0, self.pool.num_free - len(self.running))
        rows, sent = self._drafter.extend(planned, budget, spare)
        return [*planned.values(), *rows], sent

    def _admit(self, plan: StepPlan) -> list[Admission]:
        admissions: list[Admission] = []
        if not self.waiting or (self.tiers is not None and self.tiers.is_stale):
            return admissions
        max_loras = self.info.max_loras
        adapters = {None, *(other.message.adapter for other in (self.running if max_loras else ()))}
        passed: list[Request] = []  # others' adapters hold all the places
        while plan.budget > 0 and self._free_slots:
            now = self._clock()
            request = self.waiting.first(now)
            # A preempted request whose last tokens are still being computed comes back when they are known.
            if request is None or request.num_pending > 0:
                break
            adapter = request.message.adapter
            if max_loras and adapter not in adapters and len(adapters) > max_loras:
                if request.is_late(now, self.config.patience_s) or len(passed) == MOST_PASSED:
                    break  # no others, until there is a place: one of the adapters that run gets no more requests
                self.waiting.remove(request)
                passed.append(request)
                continue
            if self.tiers is not None and not request.looked:
                if self.tiers.is_full():
                    break
                if self.tiers.look(request, now):
                    self.waiting.remove(request)
                    continue
            if not self.kv.claim(request, len(self.running), is_busy=bool(plan.rows)):
                break
            self.waiting.remove(request)
            self.running[request] = None
            adapters.add(adapter)
            request.slot = self._free_slots.pop()
            request.num_known = len(request.tokens)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
                request.num_cached = request.num_scheduled
                self._stats.prompt_tokens += request.num_prompt
            admissions.append(request.admission())
            if request.is_restoring:  # its first row comes in a later step than the last block it reads
                continue
            count = min(len(request.tokens) - request.num_scheduled, plan.budget)
            count = self.kv.begin_row(request, count)
            self.kv.extend(request, request.num_scheduled + count)
            plan.rows[request] = request.row(count, samples=request.num_scheduled + count == len(request.tokens))
            plan.budget -= count
            self.kv.register(request)
        for request in passed:
            self.waiting.add(request)
        return admissions

    def _victim(self) -> Request:
        """The running request that is cheapest to lose: of the least urgent class, the fewest positions to
        compute again, counted once more for every time it was preempted before.

        The one that came first is spared while there is another, so that something always finishes.
        """
        senior = min(self.running, key=lambda r: (r.priority, r.sequence))
        others = [r for r in self.running if r is not senior] or [senior]
        return min(others, key=lambda r: (-r.priority, r.num_scheduled * (1 + r.num_preemptions), -r.sequence))

    def _preempt(self, request: Request) -> None:
        """Back to the queue. Its blocks stay cached until they are needed, so little may be lost."""
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._leave(request)
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Give up slot and blocks. Steps in flight may still write to them: later ones run after those."""
        del self.running[request]
        self._free_slots.append(request.slot)
        request.slot = -1
        self.kv.release(request)

    def apply(self, result: StepResult) -> list[Output]:
        """Take in the result of the oldest step in flight; what the fronts are to hear of it."""
        plan = self.in_flight.popleft()
        assert plan.step.step_id == result.step_id, (plan.step.step_id, result.step_id)
        self._stats.step_s += result.elapsed_s
        if self.tiers is not None:
            self.tiers.finish_step(plan.step.transfers, result.transfers, self._clock())
            self.tiers.rates.note_step(sum(row.count for row in plan.step.rows), len(plan.step.rows), result.elapsed_s)
        outputs = []
        for index, (request, row) in enumerate(zip(plan.requests, plan.step.rows, strict=False)):
            if row.sample:
                request.num_pending -= 1
            if request.finished:  # aborted, or it ended one step ago: this row was computed in vain
                continue
            if index in result.errors:
                error = result.errors[index]
                outputs.append(self.end(request, "error", error, is_refusal=error == NOTHING_LEFT))
                continue
            if index in result.prompt_logprobs:
                # By position: a preempted request computes its prompt again, and reports what it had reported.
                request.prompt_logprobs[row.start :] = result.prompt_logprobs[index]
            if request.is_prompt_only and row.start + row.count == request.num_prompt:
                self._retire(request)
                reason: FinishReason = "length" if request.message.pooling is None else "stop"
                outputs.append(request.output([], reason, embedding=result.embeddings.get(index)))
            elif row.sample:
                sent = plan.sent.get(index)
                indices = [index] if sent is None else sent.taken(result, index)
                self._stats.accepted_tokens += len(indices) - 1
                logprobs = [result.logprobs[i] for i in indices if i in result.logprobs] or None
                outputs.append(self._append(request, [result.tokens[i] for i in indices], logprobs, sent))
        self.kv.drop_replaced()
        return outputs

    def _append(
        self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs] | None, sent: "Sent | None"
    ) -> Output:
        """A token has arrived, or several by drafts: extend the request, and end it where it ends."""
        tokens, token = [*sampled, *request.forced], sampled[-1]
        request.forced = []
        if request.slot >= 0:  # drafts that were right are computed
            request.num_scheduled += len(sampled) - 1
            request.num_known += len(sampled) - 1
            if sent is not None and request.draft_state:
                self.kv.end_drafts(request, len(sampled) - 1, len(sent.tokens))
        self.kv.append(request, tokens)
        matcher = request.matcher
        if matcher is not None and not matcher.advance(tokens):
            return self.end(request, "error", f"the grammar cannot go on: {matcher.error}", is_refusal=True)
        reason: FinishReason | None = None
        stop_token = None
        if token in request.stop_ids and request.num_outputs >= request.message.sampling.min_tokens:
            reason, stop_token = "stop", token
        elif matcher is not None:
            if request.may_jump and not matcher.is_complete:
                tokens += self._jump(request, matcher)
                if matcher.error:
                    return self.end(request, "error", f"the grammar cannot go on: {matcher.error}")
            if matcher.is_complete:
                reason, stop_token = "stop", token if token in matcher.vocabulary.eos_ids else None
        if reason is None and request.num_outputs >= request.max_tokens:
            reason = "length"
        if reason is not None:
            self._retire(request)
        elif self._drafter is not None and request.may_draft:
            self._drafter.look(request, len(tokens), sent, len(self.running))
        return request.output(tokens, reason, stop_token=stop_token, logprobs=logprobs)

    def _jump(self, request: Request, matcher: "Matcher") -> list[int]:
        """Take in what the grammar forces to come next, so that one step computes all of it; the tokens taken.

        Where a step in flight has still to sample, it has no choice but the first of them: the others wait for it.
        A stop token is never forced, and the last token that a request may have never either: `_append` ends with those.
        """
        most = max(0, request.max_tokens - request.num_outputs - 1)
        forced = list(takewhile(lambda token: token not in request.stop_ids, matcher.forced()[:most]))
        if request.num_pending:
            request.forced = forced[1:]
            self._stats.forced_tokens += len(request.forced)
            return []
        if not forced or not matcher.advance(forced):
            return []
        self._stats.forced_tokens += len(forced)
        self.kv.append(request, forced)
        return forced

    def _retire(self, request: Request) -> None:
        """The request has ended, in whatever state; everything it held is free. Its last output follows."""
        if request.slot >= 0:
            self._leave(request)
        elif request in self.held:
            del self.held[request]
        else:
            if request in self.waiting:
                self.waiting.remove(request)
            if self.tiers is not None:  # it may be waiting there, or hold something
                self.tiers.leave(request)
        request.finished = True
        del self.requests[request.message.request_id]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused while requests or transfers hold blocks."""
        if self.has_work() or (self.tiers is not None and not self.tiers.forget()):
            return False
        return self.pool.forget()

    def change_model(self, info: ModelInfo, weights_version: int) -> None:
        """Nothing is in flight. What is on the device is of no use any more: requests that run are computed again, from
        keys of the fingerprint of `info`."""
        assert not self.in_flight
        self.info, self._weights_version = info, weights_version
        for request in [*self.running]:
            self._preempt(request)
        for request in [*(() if self.tiers is None else self.tiers.loading)]:
            self.waiting.add(request)
        for request in self.requests.values():
            if self.tiers is not None:
                self.tiers.leave(request)
            message = request.message
            request.root = namespace_root(model=info.fingerprint, adapter=message.adapter, salt=message.cache_salt)
            request.weights_version = weights_version
            request.keys = []
            request.page_keys.clear()
            self.kv.extend_keys(request)
        is_forgotten = self.pool.forget()
        assert is_forgotten, "a block is held, and no request runs"

    def stats(self, with_tiers: bool = True) -> Stats:
        num_loading = 0 if self.tiers is None else len(self.tiers.loading)
        return msgspec.structs.replace(
            self._stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held) + num_loading,
            num_blocks=self.pool.num_usable,
            num_used_blocks=self.pool.num_usable - self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            tiers=self.tiers.stats() if with_tiers and self.tiers is not None else {},
        )

    def check(self) -> None:
        """Assert every invariant across requests, slots and blocks; O(blocks + tokens)."""
        self.pool.check()
        loading = set(self.tiers.loading) if self.tiers is not None else set()
        assert set(self.requests.values()) == {*self.running, *self.waiting, *self.held, *loading}
        assert len(self.requests) == len(self.running) + len(self.waiting) + len(self.held) + len(loading)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "every slot is held once or free"
        refs: dict[int, int] = {}
        for request in self.running:
            request.check(self.block_size)
            self.kv.check(request)
            for block in self.kv.held(request):
                refs[block] = refs.get(block, 0) + 1
        transfers = [plan.step.transfers for plan in self.in_flight]
        for each in transfers:
            for block, _ in each.saves if each else ():
                refs[block] = refs.get(block, 0) + 1
        if self.tiers is not None:
            self.tiers.check(transfers)
        self.pool.check_refs(refs)
        for request in self.held:
            assert request.message.grammar is not None and request.matcher is None and not request.num_outputs
        for request in (*self.waiting, *self.held):
            assert request.slot == -1 and not request.blocks and request.num_scheduled == 0
        pending: dict[Request, int] = {}
        for plan in self.in_flight:
            for request, row in zip(plan.requests, plan.step.rows, strict=False):
                pending[request] = pending.get(request, 0) + row.sample
        for request in self.requests.values():
            assert request.num_pending == pending.get(request, 0)


def refusal(message: Submit, error: str) -> Output:
    return Output(message.request_id, [], finish_reason="error", error=error)
