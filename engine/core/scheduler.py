"""Decides what the next step computes. Pure state and integers: no tensors, no text, no I/O, no clock of its own.

There is no prefill and no decode: a request has positions that are ready to be computed, and each step hands
out as many as one token budget allows. Requests that run come first; then waiting ones are admitted, in
order, while their whole prompt fits. Steps are planned ahead of their results: a plan assumes that every
row under way delivers its token, and `apply` corrects what turns out otherwise (an end of sequence). A request
that drafts may follow is not planned ahead: what they are depends on its last token (engine/core/drafts.py).
"""

from array import array
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from penstock.cache.keys import namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.drafts import Drafter, Sent, taken
from penstock.engine.core.holdings import Holdings
from penstock.engine.core.request import Request
from penstock.engine.core.tiering import Tiering
from penstock.engine.core.waiting import WaitingQueue
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.messages import FinishReason, Output, Stats, Submit
from penstock.executor.protocol import NOTHING_LEFT, Admission, ModelInfo, Row, Step, StepResult, Transfers

LOOK_AHEAD = 8  # so many requests at the head of the queue have their blocks read from the tiers


class Plan(NamedTuple):
    """A step under way: what `apply` needs to read its result."""

    step_id: int
    requests: list[Request]
    rows: list[Row]  # one for each request, then those of drafts
    transfers: Transfers | None
    sent: dict[int, Sent]  # drafts, by the index of the request


class Scheduler:
    """Owns every request, the block pool and the slots; changed by one thread only."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo, clock: Callable[[], float]) -> None:
        self.config = config
        self.info = info
        self.block_size = info.block_size
        self.pool = BlockPool(info.num_blocks)
        self.running: dict[Request, None] = {}  # in order of admission
        self.waiting = WaitingQueue(config.patience_s)
        saves_per_step = -(-config.max_num_batched_tokens // info.block_size)  # as many as a step can fill
        self.tiers = Tiering(info, self.pool, saves_per_step) if info.host_slots else None
        self.held: dict[Request, None] = {}  # their grammars are being compiled
        self._holdings = Holdings(self.pool, self.tiers, info.block_size, config.enable_prefix_caching)
        self._drafter = None
        if config.speculative_config is not None:
            self._drafter = Drafter(config.speculative_config, self.pool, info.block_size, config.max_num_seqs)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._under_way: deque[Plan] = deque()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_submitted = 0
        self._num_steps = 0
        self._num_preemptions = self._prompt_tokens = self._generation_tokens = 0
        self._num_forced = self._num_accepted = 0
        self._step_s = 0.0

    # -- requests come and go ------------------------------------------------------------------------------

    def submit(self, message: Submit, matcher: Matcher | None = None) -> Output | None:
        """Queue a sequence. A refusal is its terminal output. One with a grammar and no matcher is held until
        `release` or `refuse`; it counts as waiting, keeps its place of arrival and can be aborted."""
        if message.request_id in self._requests:
            return refusal(message, "request_id: a request with this id is running")
        if self.room == 0:
            return refusal(message, f"the queue is full ({len(self._requests)} sequences are under way)")
        tokens = array("i")
        tokens.frombytes(message.tokens)
        if not 0 < len(tokens) < self.info.max_model_len + (message.pooling is not None):
            return refusal(message, f"prompt: {len(tokens)} tokens; 1 to {self.info.max_model_len - 1} can run")
        root = namespace_root(model=self.info.fingerprint, adapter=message.adapter, salt=message.cache_salt)
        request = Request(
            message.request_id,
            tokens,
            message.sampling,
            min(message.max_tokens, self.info.max_model_len - len(tokens)),
            root,
            sequence=self._num_submitted,
            arrival_s=self._clock(),
            priority=message.priority,
            adapter=message.adapter,
            pooling=message.pooling,
            # What is in the cache has no logits and no hidden states to report any more.
            skip_prefix_cache=message.skip_prefix_cache
            or not self.config.enable_prefix_caching
            or message.sampling.prompt_logprobs is not None
            or message.pooling == "mean",
            peer=message.peer,
            peer_wait_s=message.peer_wait_s,
            grammar=message.grammar,
            matcher=matcher,
        )
        self._holdings.extend_keys(request)
        if self.tiers is not None and not self.has_work():
            self.tiers.wake()
        self._num_submitted += 1
        self._requests[request.request_id] = request
        if message.grammar is not None and matcher is None:
            self.held[request] = None
        else:
            self.waiting.add(request)
        return None

    def release(self, request_id: str, grammar: str, matcher: Matcher) -> None:
        """The grammar of a held request is compiled; without effect if it has ended meanwhile."""
        request = self._held(request_id, grammar)
        if request is not None:
            del self.held[request]
            request.matcher = matcher
            self.waiting.add(request)

    def refuse(self, request_id: str, grammar: str, error: str, is_refusal: bool) -> Output | None:
        """The grammar of a held request cannot be compiled; it may not be the request's fault."""
        request = self._held(request_id, grammar)
        return None if request is None else self._finish(request, "error", error=error, is_refusal=is_refusal)

    def _held(self, request_id: str, grammar: str) -> Request | None:
        request = self._requests.get(request_id)
        return request if request in self.held and request.grammar == grammar else None

    @property
    def room(self) -> int:
        """How many more sequences `submit` takes."""
        return self.config.max_sequences - len(self._requests)

    def abort(self, request_id: str) -> Output | None:
        """End a request in any state; None when it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "abort")

    def fail(self, request_id: str, error: str) -> Output:
        """End a request in any state for what is not its own fault."""
        return self._finish(self._requests[request_id], "error", error=error)

    def has_requests(self) -> bool:
        return bool(self._requests)

    def has_work(self) -> bool:
        """Also without requests: steps under way, which may carry transfers."""
        return bool(self._requests) or bool(self._under_way)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    # -- planning ------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed before a result arrives."""
        budget = self.config.max_num_batched_tokens
        planned: dict[Request, Row] = {}
        preempted = False
        if self.tiers is not None:
            self._turn_to_tiers(self.tiers)
        for request in list(self.running):
            if budget == 0:
                break
            if request.slot < 0:  # preempted a moment ago, for an earlier one
                continue
            ready = request.num_ready
            count = min(ready - request.num_scheduled, budget)
            if count == 0 or request.is_restoring or not self._wants_more(request):
                continue
            if request.drafts and request.num_pending:
                continue
            end = request.num_scheduled + count
            missing = -(-end // self.block_size) - len(request.blocks)
            while missing > self.pool.num_free and request.slot >= 0:
                victim = self._victim()
                preempted = True
                dropped = planned.pop(victim, None)
                if dropped is not None:  # planned a moment ago, and not sent after all
                    victim.num_pending -= dropped.sample
                    budget += dropped.count
                self._preempt(victim)
            if request.slot < 0:
                continue
            if missing > 0:
                request.blocks += self.pool.allocate(missing)
            planned[request] = self._row(request, count, sample=end == ready)
            budget -= count
        for request in planned:
            self._holdings.register(request)
        admissions = [] if preempted else self._admit(budget, planned)
        rows, sent = self._send_drafts(planned)
        # Not before: an admission of this very step must not be handed a block that a row of it writes.
        self._holdings.drop_replaced()
        transfers = None if self.tiers is None else self.tiers.end_step()
        if not planned and not admissions and transfers is None and not self._must_ask():
            return None
        self._num_steps += 1
        step = Step(self._num_steps, admissions, rows, transfers)
        self._under_way.append(Plan(step.step_id, list(planned), rows, transfers, sent))
        return step

    def _send_drafts(self, planned: dict[Request, Row]) -> tuple[list[Row], dict[int, Sent]]:
        """The step's rows, with drafts where there are any: they get what is left when everybody else is served."""
        rows: list[Row] = []
        sent: dict[int, Sent] = {}
        if self._drafter is not None:
            budget = self.config.max_num_batched_tokens - sum(row.count for row in planned.values())
            # Those who run take a block each before long, and whoever waits takes all there are.
            spare = 0 if self.waiting else max(0, self.pool.num_free - len(self.running))
            rows, sent = self._drafter.extend(planned, budget, spare)
        return [*planned.values(), *rows], sent

    def _turn_to_tiers(self, tiers: Tiering) -> None:
        """Whoever has waited for the tiers comes back; those next in the queue go and wait where it is worth it."""
        now = self._clock()
        tiers.begin_step(len(self.running), now)
        for request in tiers.resume(now):
            self.waiting.add(request)
        if self.waiting and tiers.index.stores and not tiers.is_stale:
            for request in self.waiting.front(LOOK_AHEAD):
                if not request.looked and not tiers.is_full() and tiers.look(request, now):
                    self.waiting.remove(request)

    def _must_ask(self) -> bool:
        """Transfers end without a word unless a step asks; one that is under way will."""
        return self.tiers is not None and not self._under_way and (self.tiers.is_stale or not self.tiers.is_idle)

    def _admit(self, budget: int, planned: dict[Request, Row]) -> list[Admission]:
        admissions: list[Admission] = []
        if self.tiers is not None and self.tiers.is_stale:
            return admissions
        while budget > 0 and self._free_slots:
            now = self._clock()
            request = self.waiting.first(now)
            # A preempted request whose last tokens are still being computed comes back when they are known.
            if request is None or request.num_pending > 0:
                break
            if self.tiers is not None and not request.looked:
                if self.tiers.is_full():
                    break
                if self.tiers.look(request, now):
                    self.waiting.remove(request)
                    continue
            if not self._holdings.claim(request, len(self.running), is_busy=bool(planned)):
                break
            self.waiting.remove(request)
            self.running[request] = None
            request.slot = self._free_slots.pop()
            request.num_known = len(request.tokens)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
                request.num_cached = request.num_scheduled
                self._prompt_tokens += request.num_prompt
            admissions.append(
                Admission(
                    slot=request.slot,
                    request_id=request.sequence,
                    tokens=request.tokens.tobytes(),
                    num_prompt=request.num_prompt,
                    sampling=request.sampling,
                    pooling=request.pooling,  # type: ignore[arg-type]
                    adapter=request.adapter,
                )
            )
            if request.is_restoring:  # its first row comes in a later step than the last block it reads
                continue
            count = min(len(request.tokens) - request.num_scheduled, budget)
            end = request.num_scheduled + count
            planned[request] = self._row(request, count, sample=end == len(request.tokens))
            budget -= count
            self._holdings.register(request)
        return admissions

    def _row(self, request: Request, count: int, sample: bool) -> Row:
        sample = sample and request.pooling is None
        first = request.num_sent_blocks
        blocks = tuple(request.blocks[first:]) if first < len(request.blocks) else ()
        masked = sample and request.matcher is not None
        tokens = request.unknown
        row = Row(
            request.slot,
            request.num_scheduled,
            count,
            sample,
            first,
            blocks,
            request.write_from,
            masked,
            request.num_known if tokens else 0,
            tokens,
        )
        request.num_sent_blocks = len(request.blocks)
        request.num_known += len(tokens) + sample
        request.num_scheduled += count
        if sample:
            request.num_pending += 1
        return row

    def _wants_more(self, request: Request) -> bool:
        return request.num_ready - request.num_prompt < request.max_tokens or request.pooling is not None

    # -- preemption ----------------------------------------------------------------------------------------

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
        self._num_preemptions += 1
        self._leave(request)
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Give up slot and blocks. Steps under way may still write to them: later ones run after those."""
        del self.running[request]
        self._free_slots.append(request.slot)
        request.slot = -1
        self._holdings.release(request)

    # -- masks ---------------------------------------------------------------------------------------------

    def masked_rows(self) -> tuple[int, list[tuple[int, Matcher]]] | None:
        """The oldest step under way and its constrained rows whose requests still run; None if it has no masked row.

        Only the oldest step's masks can be computed: those of a later one depend on what this one samples.
        """
        plan = self._under_way[0]
        if not any(row.masked for row in plan.rows):
            return None
        rows = [
            (index, request.matcher)
            for index, (request, row) in enumerate(zip(plan.requests, plan.rows, strict=False))
            if row.masked and not request.finished and request.matcher is not None
        ]
        return plan.step_id, rows

    def end_masked(self, row: int, error: str | None = None) -> Output:
        """End the request of a row of the oldest step: its grammar is complete, or costs too much to go on with."""
        request = self._under_way[0].requests[row]
        return self._finish(request, "stop" if error is None else "error", error=error, is_refusal=error is not None)

    # -- results -------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[Output]:
        """Take in the result of the oldest step under way; the news for the fronts."""
        plan = self._under_way.popleft()
        assert plan.step_id == result.step_id, (plan.step_id, result.step_id)
        self._step_s += result.elapsed_s
        if self.tiers is not None:
            self.tiers.finish_step(plan.transfers, result.transfers, self._clock())
            self.tiers.rates.note_step(sum(row.count for row in plan.rows), len(plan.rows), result.elapsed_s)
        outputs = []
        for index, (request, row) in enumerate(zip(plan.requests, plan.rows, strict=False)):
            if row.sample:
                request.num_pending -= 1
            if request.finished:  # aborted, or it ended one step ago: this row was computed in vain
                continue
            if index in result.errors:
                error = result.errors[index]
                outputs.append(self._finish(request, "error", error=error, is_refusal=error == NOTHING_LEFT))
                continue
            if index in result.prompt_logprobs:
                # By position: a preempted request computes its prompt again, and reports what it had reported.
                request.prompt_logprobs[row.start :] = result.prompt_logprobs[index]
            if index in result.embeddings:
                outputs.append(self._finish(request, "stop", embedding=result.embeddings[index]))
            elif row.sample:
                sent = plan.sent.get(index)
                indices = taken(result, index, sent)
                self._num_accepted += len(indices) - 1
                logprobs = [result.logprobs[i] for i in indices if i in result.logprobs] or None
                outputs.append(self._append(request, [result.tokens[i] for i in indices], logprobs, sent))
        self._holdings.drop_replaced()
        return outputs

    def _append(self, request: Request, sampled: list[int], logprobs: list | None, sent: Sent | None = None) -> Output:
        """A token has arrived, or several by drafts: extend the request, and end it where it ends."""
        tokens, token = [*sampled, *request.forced], sampled[-1]
        request.forced = []
        if request.slot >= 0:  # drafts that were right are computed
            request.num_scheduled += len(sampled) - 1
            request.num_known += len(sampled) - 1
        self._extend(request, tokens)
        matcher = request.matcher
        if matcher is not None and not matcher.advance(tokens):
            return self._finish(request, "error", error=f"the grammar cannot go on: {matcher.error}", is_refusal=True)
        if token in request.stop_ids and request.num_outputs >= request.sampling.min_tokens:
            return self._finish(request, "stop", tokens=tokens, logprobs=logprobs, stop_token=token)
        if matcher is not None:
            if request.may_jump and not matcher.is_complete:
                tokens += self._jump(request, matcher)
                if matcher.error:
                    return self._finish(request, "error", error=f"the grammar cannot go on: {matcher.error}")
            if matcher.is_complete:
                end = token if token in matcher.vocabulary.eos_ids else None
                return self._finish(request, "stop", tokens=tokens, logprobs=logprobs, stop_token=end)
        if request.num_outputs >= request.max_tokens:
            return self._finish(request, "length", tokens=tokens, logprobs=logprobs)
        if self._drafter is not None and request.may_draft:
            self._drafter.look(request, len(tokens), sent, len(self.running))
        return self._output(request, tokens, logprobs=logprobs)

    def _extend(self, request: Request, tokens: list[int]) -> None:
        request.tokens.extend(tokens)
        self._generation_tokens += len(tokens)
        if len(request.tokens) % self.block_size < len(tokens):  # one more block is full, or several
            self._holdings.extend_keys(request)
            if request.slot >= 0:
                self._holdings.register(request)

    def _jump(self, request: Request, matcher: Matcher) -> list[int]:
        """Take in what the grammar forces to come next, so that one step computes all of it; the tokens taken.

        Where a step under way has still to sample, it has no choice but the first of them: the others wait for it.
        A stop token is never forced, and the last token that a request may have never either: `_append` ends with those.
        """
        room = max(0, request.max_tokens - request.num_outputs - 1)
        forced = list(takewhile(lambda token: token not in request.stop_ids, matcher.forced()[:room]))
        if request.num_pending:
            request.forced = forced[1:]
            self._num_forced += len(request.forced)
            return []
        if not forced or not matcher.advance(forced):
            return []
        self._num_forced += len(forced)
        self._extend(request, forced)
        return forced

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        tokens: list[int] | None = None,
        **fields: object,
    ) -> Output:
        """The one terminal output of a request; everything it held is free."""
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
        del self._requests[request.request_id]
        return self._output(request, tokens or [], finish_reason=reason, **fields)

    def _output(self, request: Request, tokens: list[int], **fields: object) -> Output:
        if not request.started_output:
            request.started_output = True
            fields["num_cached_tokens"] = request.num_cached
            fields["prompt_logprobs"] = request.prompt_logprobs or None
            if request.first_scheduled_s is not None:
                fields["queued_s"] = request.first_scheduled_s - request.arrival_s
        if request.num_preemptions:
            fields["num_preemptions"] = request.num_preemptions
        return Output(request.request_id, tokens, **fields)  # type: ignore[arg-type]

    # -- looking in ----------------------------------------------------------------------------------------

    def pools(self) -> dict[str, BlockPool]:
        """What can be matched, by tier; what a store has passes through the host first."""
        return {"device": self.pool} if self.tiers is None else {"device": self.pool, "host": self.tiers.index.host}

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused while requests or transfers hold blocks."""
        if self.has_work() or (self.tiers is not None and not self.tiers.forget()):
            return False
        return self.pool.forget()

    def stats(self) -> Stats:
        stats = Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held) + (0 if self.tiers is None else self.tiers.num_loading),
            num_blocks=self.pool.num_usable,
            num_used_blocks=self.pool.num_usable - self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            prefix_queries=self._holdings.prefix_queries,
            prefix_hits=self._holdings.prefix_hits,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_s=self._step_s,
            forced_tokens=self._num_forced,
            accepted_tokens=self._num_accepted,
            tiers={} if self.tiers is None else self.tiers.stats(),
        )
        return stats if self._drafter is None else self._drafter.told(stats)

    def check(self) -> None:
        """Assert every invariant across requests, slots and blocks; O(blocks + tokens)."""
        self.pool.check()
        loading = set(self.tiers.loading) if self.tiers is not None else set()
        assert set(self._requests.values()) == {*self.running, *self.waiting, *self.held, *loading}
        assert len(self._requests) == len(self.running) + len(self.waiting) + len(self.held) + len(loading)
        slots = [r.slot for r in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "every slot is held once or free"
        refs: dict[int, int] = {}
        for request in self.running:
            assert request.num_registered <= len(request.blocks)
            assert request.num_scheduled <= min(request.num_ready, len(request.blocks) * self.block_size)
            assert request.num_known + len(request.unknown) == request.num_ready
            for block in request.blocks:
                refs[block] = refs.get(block, 0) + 1
        for plan in self._under_way:
            for block, _ in plan.transfers.saves if plan.transfers else ():
                refs[block] = refs.get(block, 0) + 1
        if self.tiers is not None:
            self.tiers.check([plan.transfers for plan in self._under_way])
        self._holdings.check()
        for block in range(1, self.pool.num_blocks):
            assert self.pool.refs(block) == refs.get(block, 0), f"block {block}: references differ from owners"
        for request in self.held:
            assert request.grammar is not None and request.matcher is None and not request.tokens[request.num_prompt :]
        for request in (*self.waiting, *self.held):
            assert request.slot == -1 and not request.blocks and request.num_scheduled == 0
        pending: dict[Request, int] = {}
        for plan in self._under_way:
            for request, row in zip(plan.requests, plan.rows, strict=False):
                pending[request] = pending.get(request, 0) + row.sample
        for request in self._requests.values():
            assert request.num_pending == pending.get(request, 0)


def refusal(message: Submit, error: str) -> Output:
    return Output(message.request_id, [], finish_reason="error", error=error)
