"""The engine core's side of constrained requests: grammars on their way, and the masks of the step under way.

It brings together what nobody else should know of each other: the scheduler (which requests), the compiler (their
grammars), the mask filler (their masks) and the executor (which wants them before it samples).
"""

import contextlib
import queue

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.grammar.compiler import Compiler, GrammarRefused, Job
from penstock.engine.grammar.masks import MaskFiller
from penstock.engine.messages import Output, Submit
from penstock.executor.protocol import Executor

COMPILED_WAIT_S = 0.005  # how long a core with nothing else to do waits for a grammar before it looks at its inbox


class Constraints:
    def __init__(self, scheduler: Scheduler, executor: Executor, compiler: Compiler) -> None:
        self._scheduler, self._executor, self._compiler = scheduler, executor, compiler
        self._compiled: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
        self._filler: MaskFiller | None = None  # its threads start with the first constrained request
        self._started_step: int | None = None

    # -- grammars ------------------------------------------------------------------------------------------

    def warm(self) -> None:
        self._compiler.warm()

    def submit(self, message: Submit) -> Output | None:
        """Queue a request with a grammar. One that is not known yet is compiled while the request waits."""
        assert message.grammar is not None
        matcher = self._compiler.cached(message.grammar)
        output = self._scheduler.submit(message, matcher)
        if output is not None:
            return output
        try:
            if self._filler is None:
                self._filler = MaskFiller(self._scheduler.config.max_num_seqs)
            if matcher is None:
                job = self._compiler.start(message.grammar)
                job.result.add_done_callback(lambda _: self._compiled.put((message.request_id, job)))
        except RuntimeError as error:  # a limit on threads or on memory: those without a grammar need none
            return self._scheduler.fail(message.request_id, f"the grammar cannot be compiled: {error}")
        return None

    def take_compiled(self) -> list[Output]:
        """Let the requests go whose grammars are ready, and end those whose grammars failed."""
        outputs: list[Output] = []
        while not self._compiled.empty():
            self._take(*self._compiled.get(), outputs)
        return outputs

    def wait_for_compiled(self) -> list[Output]:
        """The same, a moment later: for a core whose only requests wait for their grammars."""
        outputs: list[Output] = []
        with contextlib.suppress(queue.Empty):
            self._take(*self._compiled.get(timeout=COMPILED_WAIT_S), outputs)
        return outputs

    def _take(self, request_id: str, job: Job, outputs: list[Output]) -> None:
        error = job.result.exception()
        if error is None:
            self._scheduler.release(request_id, job.source, job.result.result())
            return
        is_refusal = isinstance(error, GrammarRefused)
        what = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        output = self._scheduler.refuse(request_id, job.source, f"the grammar cannot be compiled: {what}", is_refusal)
        if output is not None:
            outputs.append(output)

    # -- masks ---------------------------------------------------------------------------------------------

    def begin_masks(self) -> None:
        """Start to fill the masks of the only step under way, before it is submitted: its forward pass runs meanwhile."""
        wanted = self._scheduler.masked_rows()
        if wanted is not None:
            assert self._filler is not None
            self._started_step, rows = wanted
            self._filler.start(rows)

    def set_masks(self) -> list[Output]:
        """Give the executor the masks of the oldest step under way, and the outputs of requests that end by that."""
        if self._filler is None:
            return []
        if self._started_step is not None:
            step_id, masks = self._started_step, self._filler.finish()
            self._started_step = None
        else:
            wanted = self._scheduler.masked_rows()
            if wanted is None:
                return []
            step_id, masks = wanted[0], self._filler.fill(wanted[1])
        self._executor.set_masks(step_id, masks.rows, masks.bits)
        outputs = [self._scheduler.end_masked(row) for row in masks.ended]
        for row, error in masks.errors.items():
            outputs.append(self._scheduler.end_masked(row, f"the grammar cannot go on: {error}"))
        return outputs

    def close(self) -> None:
        self._compiler.close()
        if self._filler is not None:
            self._filler.close()
