"""Decides what the next step computes. The scheduler has no tensors, no text, no I/O and no clock of its own.

Prefill and decode are not distinguished: a request has positions that are ready to be computed, and each step computes
as many of them as the token budget allows. Running requests come first; then waiting requests are admitted in order, as
long as their whole prompts fit. Steps are planned before the results of earlier steps are known: a plan assumes that
every row in flight yields a token, and `apply` corrects the plan otherwise (at an end of sequence). A request with
draft tokens is not planned ahead, because its drafts depend on its last token (engine/core/drafts.py).
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from penstock.cache.keys import namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.drafts import Drafter, DraftRows, NoDrafter
from penstock.engine.core.fair_queue import WaitingQueue
from penstock.engine.core.grammars import GrammarState
from penstock.engine.core.kv import Kv
from penstock.engine.core.page_keys import NEVER
from penstock.engine.core.request import Claim, Request, RequestKv, cheapest_to_preempt
from penstock.engine.messages import FinishReason, Output, Stats, Submit
from penstock.executor.protocol import NOTHING_LEFT, Admission, ModelInfo, Row, Step, StepResult

MOST_PASSED = 64  # requests that may wait for an adapter slot while later ones are admitted


class InFlight(NamedTuple):
    """A step in flight: what `apply` needs to read its result."""

    step: Step  # the rows of the requests, then the rows of drafts
    requests: list[Request]
    sent: dict[int, DraftRows]  # drafts, by the index of the request


@dataclass
class StepPlan:
    """A step that is being planned."""

    budget: int  # the rest of its tokens
    rows: dict[Request, Row] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    is_full: bool = False  # a running request lacked pages: nothing may be admitted
    is_fixed: bool = False  # no row may be dropped, because other requests may read its blocks


class Scheduler:
    """Owns every request, the block pool and the slots; changed by one thread only."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo, clock: Callable[[], float]) -> None:
        self.config = config
        self.info = info
        self.pool = BlockPool(info.num_blocks)
        self.requests: dict[str, Request] = {}  # all that have not ended, by id
        self.running: dict[Request, None] = {}  # in order of admission
        self.waiting = WaitingQueue(config.patience_s)
        self.held: dict[Request, None] = {}  # requests whose grammars are being compiled, or that `hold_new` holds
        self.first_held = NEVER  # sequence of the first request that `hold_new` holds
        self.in_flight: deque[InFlight] = deque()  # the oldest step first
        self._stats = Stats()  # only the counters; `stats` adds the gauges
        self._step_tokens = config.max_num_batched_tokens or info.max_num_batched_tokens
        self.kv = Kv(self.pool, info, self._step_tokens, config.enable_prefix_caching, self._stats, clock)
        self.tiers = self.kv.tiers
        self.on_end: Callable[[str | None], None] = lambda _adapter: None  # called with each ended request's adapter
        drafts = config.speculative_config
        self._drafter: Drafter | NoDrafter = NoDrafter()
        if drafts is not None:
            self._stats.accepted_at = [0] * drafts.most_drafts
            self._drafter = Drafter(drafts, info.block_size, config.max_num_seqs, self._stats, self.kv)
        self._clock = clock
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_submitted = 0
        self._weights_version = 0

    def submit(self, message: Submit, matcher: GrammarState | None = None) -> Request:
        """Queue or hold a sequence, which the front has checked. A held one counts as waiting, keeps its place in the
        queue and can be aborted."""
        tokens, most = array("i", message.tokens), self.info.max_model_len
        assert message.request_id not in self.requests and self.num_free_places > 0
        assert 0 < len(tokens) <= most - (message.pooling is None and message.max_tokens > 0)
        # Logits and hidden states are not cached, so the whole prompt has to be computed.
        sampling = message.sampling
        needs_all = sampling.prompt_logprobs is not None or message.pooling == "mean"
        request = Request(
            message,
            self._num_submitted,
            self._clock(),
            tokens,
            min(message.max_tokens, most - len(tokens)),
            RequestKv(self._root(message), needs_all or not self.config.enable_prefix_caching),
            matcher,
        )
        request.weights_version = self._weights_version
        request.may_draft = request.may_draft and self.config.speculative_config is not None
        self.kv.keys.extend(request)
        if not self.has_work():
            self.tiers.wake()
            self.waiting.forget()
        self._num_submitted += 1
        self.requests[message.request_id] = request
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request, or hold it: until its grammar is compiled, or as long as `hold_new` holds it."""
        if request.lacks_matcher or request.sequence >= self.first_held:
            self.held[request] = None
        else:
            self.held.pop(request, None)
            self.waiting.add(request)

    def _root(self, message: Submit) -> bytes:
        """Return the root of a request's block keys: blocks with other weights, adapters or salts never match."""
        return namespace_root(model=self.info.fingerprint, adapter=message.adapter, salt=message.cache_salt)

    def hold_new(self, is_on: bool) -> None:
        """Hold the requests that come from now on, or queue those that were held for this reason."""
        self.first_held = self._num_submitted if is_on else NEVER
        for request in [*self.held]:
            self.queue(request)

    def end(self, request: Request, reason: FinishReason, error: str | None = None, is_refusal: bool = False) -> Output:
        """End a request in any state. `is_refusal`: the request itself is invalid."""
        self._retire(request)
        return request.output([], reason, error=error, is_refusal=is_refusal)

    def abort(self, request_id: str) -> Output | None:
        """End a request; return None if it has ended already."""
        request = self.requests.get(request_id)
        return None if request is None else self.end(request, "abort")

    @property
    def num_free_places(self) -> int:
        """The number of further sequences that `submit` takes."""
        return self.config.max_sequences - len(self.requests)

    def has_work(self) -> bool:
        """Return whether there are requests, or steps in flight, which may only carry transfers."""
        return bool(self.requests) or bool(self.in_flight)

    def schedule(self) -> Step | None:
        """Plan and return the next step; return None when nothing can be computed before a result arrives."""
        plan, tiers = StepPlan(self._step_tokens), self.tiers
        tiers.begin(self.waiting, len(self.running))
        overtaken = self._overtaken() if self._free_slots and self.waiting.is_shared else ()
        running = [each for each in self.running if each not in overtaken] if overtaken else [*self.running]
        self._plan_rows(running, plan)
        if overtaken:
            self._admit(plan, overtaken)
            self._plan_rows(overtaken, plan)
        self._admit(plan)
        # Running requests take a block each before long, and waiting ones take all there are.
        spare = 0 if self.waiting else max(0, self.pool.num_free - len(self.running))
        draft_rows, sent = self._drafter.extend(plan.rows, plan.budget, spare)
        transfers = self.kv.end_step(plan.rows)
        rows = [*plan.rows.values(), *draft_rows]
        # The end of a transfer is reported only with a step's result; a step in flight will bring it.
        if not (rows or plan.admissions or transfers) and (self.in_flight or (tiers.is_idle and not tiers.is_stale)):
            return None
        self._stats.num_steps += 1
        step = Step(self._stats.num_steps, plan.admissions, rows, transfers)
        self.in_flight.append(InFlight(step, list(plan.rows), sent))
        return step

    def _overtaken(self) -> list[Request]:
        """Return the running requests whose long prompts let the next waiting request pass, because its client has used
        less."""
        if (first := self.waiting.first(self._clock())) is None:
            return []
        prompts = [request for request in self.running if request.num_scheduled < request.num_prompt - 1]
        return [each for each in prompts if self.waiting.is_before(first, each)]

    def _plan_rows(self, requests: Sequence[Request], plan: StepPlan) -> None:
        """Plan the next rows of running requests, and register the blocks of all rows."""
        for request in requests:
            if plan.budget == 0:
                break
            if request.slot >= 0:  # else it was just preempted, for an earlier one
                self._plan_row(request, plan)
        for request in plan.rows:
            self.kv.register(request)
        plan.is_fixed = bool(plan.rows)

    def _plan_row(self, request: Request, plan: StepPlan) -> None:
        """Plan the next row of a running request, if any of its positions is ready."""
        ready = request.num_ready
        count = min(ready - request.num_scheduled, plan.budget)
        if count == 0 or request.kv.is_restoring or not request.wants_more:
            return
        if request.num_pending and (request.drafts or request.awaits_drafts):
            return
        end = request.num_scheduled + count
        if end > request.kv.covered_end:  # most rows of one token need no page
            count = self.kv.begin_row(request, count)
            end = request.num_scheduled + count
            missing = self.kv.num_missing(request, end)
            if missing > self.pool.num_free and (plan.is_fixed or not self._make_room(request, missing, plan)):
                return
            self.kv.extend(request, end)
        plan.rows[request] = request.row(count, samples=end == ready)
        plan.budget -= count

    def _make_room(self, request: Request, missing: int, plan: StepPlan) -> bool:
        """Preempt other requests, and finally the request itself; return whether there is room. If only saves hold what is
        missing, preempt none: those pages are free once the saves have ended."""
        plan.is_full = True
        while missing > self.pool.num_free and request.slot >= 0:
            if missing <= self.pool.num_free + self.tiers.num_saved_only():
                return False
            victim = cheapest_to_preempt(self.running)
            dropped = plan.rows.pop(victim, None)
            if dropped is not None:  # it was planned for this step, and is not sent after all
                victim.num_pending -= dropped.sample
                plan.budget += dropped.count
            self._preempt(victim)
        return request.slot >= 0

    def _admit(self, plan: StepPlan, overtaken: Sequence[Request] = ()) -> None:
        """Admit waiting requests in order, as long as their whole prompts fit and they come before those that are
        `overtaken`; plan their first rows."""
        if not self.waiting or plan.is_full or self.tiers.is_stale:
            return
        max_loras = self.info.max_loras
        adapters = {None, *(other.message.adapter for other in (self.running if max_loras else ()))}
        passed: list[Request] = []  # the adapters of other requests hold all the places
        while plan.budget > 0 and self._free_slots:
            now = self._clock()
            request = self.waiting.first(now)
            # A preempted request whose last tokens are still being computed comes back when they are known.
            if request is None or request.num_pending > 0:
                break
            if not all(self.waiting.is_before(request, each) for each in overtaken):
                break
            adapter = request.message.adapter
            if max_loras and adapter not in adapters and len(adapters) > max_loras:
                if now - request.arrival_s > self.config.patience_s or len(passed) == MOST_PASSED:
                    break  # admit nothing until there is a place: one of the running adapters gets no more requests
                self.waiting.remove(request)
                passed.append(request)
                continue
            claim = self.kv.claim(request, len(self.running))
            if claim is Claim.NO_ROOM:
                break
            self.waiting.remove(request)
            if claim is Claim.LOADING:
                continue
            self.running[request] = None
            adapters.add(adapter)
            request.slot = self._free_slots.pop()
            request.num_known = len(request.tokens)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
                self._stats.prompt_tokens += request.num_prompt
                self.waiting.take_turn(request, request.num_prompt - request.num_scheduled)
            plan.admissions.append(request.admission())
            plan.is_fixed = True
            self._plan_row(request, plan)
            # Not while blocks of its prefix are being restored: no other request may read them yet.
            if request in plan.rows:
                self.kv.register(request)
        for request in passed:
            self.waiting.add(request)

    def _preempt(self, request: Request) -> None:
        """Return a running request to the queue. Its blocks stay cached until they are evicted."""
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._leave(request)
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Free the slot and the pages. Steps in flight may still write to them; later steps run after those."""
        del self.running[request]
        self._free_slots.append(request.slot)
        request.slot = -1
        self.kv.release(request)

    def apply(self, result: StepResult) -> list[Output]:
        """Apply the result of the oldest step in flight; return the outputs for the front."""
        plan = self.in_flight.popleft()
        assert plan.step.step_id == result.step_id, (plan.step.step_id, result.step_id)
        self._stats.step_s += result.elapsed_s
        self._drafter.note_cost(plan.step, len(plan.requests), self._clock())
        self.tiers.finish(plan.step, result)
        outputs = []
        for index, (request, row) in enumerate(zip(plan.requests, plan.step.rows, strict=False)):
            if row.sample:
                request.num_pending -= 1
            if request.finished:  # it was aborted, or ended one step ago: this row was computed in vain
                continue
            if index in result.errors:
                error = result.errors[index]
                outputs.append(self.end(request, "error", error, is_refusal=error == NOTHING_LEFT))
                continue
            if index in result.prompt_logprobs and not request.has_output:
                # By position: a preempted request computes its prompt again. The first output has the list itself.
                request.prompt_logprobs[row.start :] = result.prompt_logprobs[index]
            if request.is_prompt_only and row.start + row.count == request.num_prompt:
                self._retire(request)
                reason: FinishReason = "length" if request.message.pooling is None else "stop"
                outputs.append(request.output([], reason, embedding=result.embeddings.get(index)))
            elif row.sample:
                outputs.append(self._append(request, plan, index, result))
        if self.waiting.is_shared:
            for output in outputs:
                if (running := self.requests.get(output.request_id)) is not None:
                    self.waiting.charge(running.message.client, len(output.tokens))
        self.kv.drop_replaced()
        return outputs

    def _append(self, request: Request, plan: InFlight, index: int, result: StepResult) -> Output:
        """Append the token that the row sampled, or several with accepted drafts; end the request if it is complete."""
        sent, indices = plan.sent.get(index), [index]
        if sent is not None:
            indices = sent.accepted(result, index)
            self._stats.accepted_tokens += len(indices) - 1
            for place in range(len(indices) - 1):
                self._stats.accepted_at[place] += 1
        sampled = [result.tokens[i] for i in indices]
        logprobs = [result.logprobs[i] for i in indices if i in result.logprobs] or None
        tokens, token, num_right = [*sampled, *request.forced], sampled[-1], len(sampled) - 1
        request.forced = []
        if request.slot >= 0 and sent is not None:  # drafts that were right are computed
            request.num_scheduled += num_right
            request.num_known += num_right
            self.kv.end_drafts(request, num_right, len(sent.tokens))
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
                    return self.end(request, "error", f"the grammar cannot go on: {matcher.error}", is_refusal=True)
            if matcher.is_complete:
                reason, stop_token = "stop", token if token in matcher.eos_ids else None
        if reason is None and request.num_outputs >= request.max_tokens:
            reason = "length"
        if reason is not None:
            self._retire(request)
        elif request.may_draft:
            drafted = result.drafts.get(indices[-1], []) if plan.step.rows[index].drafts else None
            self._drafter.choose_drafts(request, len(tokens), sent, len(self.running), drafted)
        return request.output(tokens, reason, stop_token=stop_token, logprobs=logprobs, accepted_drafts=num_right)

    def _jump(self, request: Request, matcher: GrammarState) -> list[int]:
        """Append the tokens that the grammar forces next, so that one step computes all of them; return these tokens.

        If a step in flight still has to sample, it can sample only the first of them; the others are kept until then. A
        stop token is never forced, nor is the last token that the request may have: `_append` ends the request there.
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
        """Free the resources of a request that has ended, in any state. Its last output follows."""
        if request.slot >= 0:
            self._leave(request)
        else:
            self.held.pop(request, None)
            if request in self.waiting:
                self.waiting.remove(request)
            self.kv.release(request)
        request.finished = True
        del self.requests[request.message.request_id]
        self.on_end(request.message.adapter)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; return False and forget nothing while requests or transfers hold blocks."""
        return not self.has_work() and self.kv.forget()

    def change_model(self, info: ModelInfo, weights_version: int) -> None:
        """Invalidate everything cached on the device, with no step in flight: running requests are recomputed, and all
        block keys start from the fingerprint of `info`."""
        assert not self.in_flight
        self.info, self._weights_version = info, weights_version
        for request in [*self.running]:
            self._preempt(request)
        for request in [*self.tiers.loading]:
            self.waiting.add(request)
        for request in self.requests.values():
            self.kv.release(request)
            self.kv.keys.change_root(request, self._root(request.message))
            request.weights_version = weights_version
        is_forgotten = self.pool.forget()
        assert is_forgotten, "a block is held, and no request runs"

    def stats(self, with_tiers: bool = True) -> Stats:
        """Return the counters with the gauges of this moment."""
        has_adapters = with_tiers and self.info.max_loras > 0
        places = [self.running, (*self.waiting, *self.held, *self.tiers.loading)] if has_adapters else []
        adapters = [sorted({key for each in place if (key := each.message.adapter)}) for place in places]
        return msgspec.structs.replace(
            self._stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held) + len(self.tiers.loading),
            num_blocks=self.pool.num_usable,
            num_used_blocks=self.pool.num_usable - self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            tiers=self.tiers.stats() if with_tiers else {},
            adapters=adapters,
        )

    def check(self) -> None:
        """Assert every invariant across requests, slots and blocks; O(blocks + tokens)."""
        self.pool.check()
        places = [*self.running, *self.waiting, *self.held, *self.tiers.loading]
        assert set(self.requests.values()) == {*places} and len(self.requests) == len(places)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "every slot is held once or free"
        self.kv.check(self.running, [plan.step.transfers for plan in self.in_flight])
        for request in self.held:
            assert (request.lacks_matcher or request.sequence >= self.first_held) and not request.num_outputs
        for request in (*self.waiting, *self.held):
            assert request.slot == -1 and not request.kv.blocks and request.num_scheduled == 0
        pending: dict[Request, int] = {}
        for plan in self.in_flight:
            for request, row in zip(plan.requests, plan.step.rows, strict=False):
                pending[request] = pending.get(request, 0) + row.sample
        for request in self.requests.values():
            assert request.num_pending == pending.get(request, 0)
