"""Constrained requests in the engine core: compiles their grammars and fills the masks of the steps in flight.

It connects the scheduler (the requests), the compiler (their grammars), the mask filler (their masks) and the executor,
which needs the masks before it samples.
"""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from penstock.engine.core.grammars import (
    CompileJob,
    FillMasks,
    GrammarCompiler,
    GrammarRefused,
    GrammarState,
    StepMasks,
)
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Output, Submit
from penstock.executor.protocol import Executor

COMPILED_WAIT_S = 0.005  # how long an otherwise idle core waits for a grammar before it reads its inbox again


class Constraints:
    def __init__(self, scheduler: Scheduler, executor: Executor, compiler: GrammarCompiler | None) -> None:
        self._scheduler, self._executor, self._compiler = scheduler, executor, compiler
        self._jobs: dict[Request, CompileJob] = {}  # by the requests that wait for them, unless these have ended
        self._fill: FillMasks | None = None  # created with the first constrained request
        self._thread = ThreadPoolExecutor(1, "masks")
        self._filling: Future[StepMasks] | None = None  # of the only step in flight, while it computes

    def submit(self, message: Submit) -> None:
        """Queue a request with a grammar. A new grammar is compiled while the request waits."""
        assert message.grammar is not None and self._compiler is not None
        matcher = job = None
        try:
            if self._fill is None:
                self._thread.submit(int).result()  # starts the thread here, so that a failure raises here
                self._fill = self._compiler.mask_filler(self._scheduler.config.max_num_seqs)
            matcher = self._compiler.cached(message.grammar)
            if matcher is None:
                job = self._compiler.start(message.grammar)
        except RuntimeError as error:  # a limit on threads or memory, which requests without a grammar do not need
            job = CompileJob(message.grammar)
            job.result.set_exception(error)
        request = self._scheduler.submit(message, matcher)
        if job is not None:
            self._jobs[request] = job

    def warm(self) -> None:
        """Build the vocabulary in a thread before the first constrained request needs it. Further calls do nothing."""
        if self._compiler is not None:
            self._compiler.warm()

    def take_compiled(self) -> list[Output]:
        """Queue the requests whose grammars are compiled, and end those whose grammars failed or take too long."""
        outputs: list[Output] = []
        for request, job in [*self._jobs.items()] if self._jobs else ():
            limit = job.limit_passed()
            if not request.finished and limit is None and not job.result.done():
                continue
            del self._jobs[request]
            if request.finished or limit is not None:
                assert self._compiler is not None
                self._compiler.give_up(job)
            if request.finished:
                continue
            error = job.result.exception() if limit is None else GrammarRefused(f"it {limit}")
            if error is None:
                request.matcher = job.result.result()
                self._scheduler.queue(request)
            else:
                is_refusal = isinstance(error, GrammarRefused)
                what = str(error) if is_refusal else f"{type(error).__name__}: {error}"
                what = f"the grammar cannot be compiled: {what}"
                outputs.append(self._scheduler.end(request, "error", what, is_refusal))
        return outputs

    def wait_for_compiled(self) -> list[Output]:
        """Wait briefly for the next grammar and queue its request, if no request can run without its grammar."""
        wait([job.result for job in self._jobs.values()], COMPILED_WAIT_S, FIRST_COMPLETED)
        return self.take_compiled()

    def begin_masks(self) -> None:
        """Start filling the masks of the only step in flight, before it is submitted, so that this overlaps its forward
        pass."""
        if self._fill is not None and (rows := self._masked_rows()) is not None:
            assert self._filling is None, "one step at a time"
            self._filling = self._thread.submit(self._fill, rows)

    def set_masks(self) -> list[Output]:
        """Pass the masks of the oldest step in flight to the executor; return the outputs of requests that end.

        The masks of a later step depend on the tokens that this one samples.
        """
        if self._fill is None:
            return []
        if (filling := self._filling) is not None:
            self._filling = None  # also if it has failed
            masks = filling.result()
        elif (rows := self._masked_rows()) is not None:
            masks = self._fill(rows)
        else:
            return []
        step, requests, _ = self._scheduler.in_flight[0]
        self._executor.set_masks(step.step_id, masks.rows, masks.bits)
        # `ended`: the grammar is complete; `errors`: it has become too expensive.
        outputs = [self._scheduler.end(requests[row], "stop") for row in masks.ended]
        for row, error in masks.errors.items():
            error = f"the grammar cannot go on: {error}"
            outputs.append(self._scheduler.end(requests[row], "error", error, is_refusal=True))
        return outputs

    def _masked_rows(self) -> list[tuple[int, GrammarState]] | None:
        """Return the constrained rows of the oldest step in flight whose requests still run; None if no row has a
        mask."""
        step, requests, _ = self._scheduler.in_flight[0]
        if not any(row.masked for row in step.rows):
            return None
        return [
            (index, request.matcher)
            for index, (request, row) in enumerate(zip(requests, step.rows, strict=False))
            if row.masked and not request.finished and request.matcher is not None
        ]

    def close(self) -> None:
        self._thread.shutdown()
        if self._compiler is not None:
            self._compiler.close()
