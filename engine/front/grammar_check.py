"""The front's side of constrained requests: is there a grammar for what is asked, found out before anything runs.

The core compiles the same text again; what passed here passes there. A grammar that takes more than `COMPILE_LIMIT_S`
of a core is refused: its thread goes on to the end that llguidance's own limits set, and disturbs no other work.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType

from penstock.engine.grammar.compiler import Compiler, GrammarRefused, Job, Work
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs

COMPILE_LIMIT_S = 2.0  # of the compiling thread's own work, so that a busy machine takes what an idle one does
WAIT_LIMIT_S = 20.0  # from when a thread takes it up
LOOK_S = 0.05  # at least so long between two looks at what was spent


class GrammarCheck:
    """`special_ids`: of the tokenizer's special tokens, by their texts. Raises InvalidRequest naming `field`, or the field of `wanted`."""

    def __init__(self, compiler: Compiler, special_ids: Mapping[str, int] = MappingProxyType({})) -> None:
        self._compiler, self._special_ids = compiler, special_ids

    def now(self, wanted: StructuredOutputs, field: str | None = None) -> str:
        """The grammar's text, for the core; waits until it is compiled."""
        source = self._source(wanted, field)
        if self._compiler.cached(source) is None:
            job = self._compiler.start(source)
            work = job.began.result()
            while not job.result.done():
                with contextlib.suppress(TimeoutError):
                    job.result.exception(_next_look_s(work))
                if not job.result.done() and (limit := _limit_passed(work)):
                    self._compiler.give_up(job)
                    raise InvalidRequest(field or wanted.field, limit)
            _judge(job.result, wanted, field)
        return source

    async def soon(self, wanted: StructuredOutputs, field: str | None = None) -> str:
        """The same, without holding up the event loop."""
        source = self._source(wanted, field)
        if self._compiler.cached(source) is None:
            job = self._compiler.start(source)
            try:
                work = await asyncio.wrap_future(job.began)
                if limit := await _done(job, work):
                    raise InvalidRequest(field or wanted.field, limit)
            finally:
                self._compiler.give_up(job)  # unless it is done
            _judge(job.result, wanted, field)
        return source

    def _source(self, wanted: StructuredOutputs, field: str | None) -> str:
        # Read when it is asked for: the readers of schemas are a thousand lines that most processes never need.
        from penstock.engine.grammar.source import grammar_source

        return grammar_source(wanted, self._special_ids, field)

    def warm(self) -> None:
        self._compiler.warm()

    def close(self) -> None:
        self._compiler.close()


async def _done(job: Job, work: Work) -> str | None:
    """Wait until it is; otherwise the limit that has been passed."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Not wrap_future: its exception would have to be fetched even when its caller has left.
    job.result.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    while not done.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_next_look_s(work)):
                await done.wait()
        if not job.result.done() and (limit := _limit_passed(work)):
            return limit
    return None


def _next_look_s(work: Work) -> float:
    return max(min(COMPILE_LIMIT_S - work.spent_s(), WAIT_LIMIT_S - work.waited_s()), LOOK_S)


def _limit_passed(work: Work) -> str | None:
    if work.spent_s() > COMPILE_LIMIT_S:
        return f"takes longer than {COMPILE_LIMIT_S:g} s of one core to compile, which is the limit"
    if work.waited_s() > WAIT_LIMIT_S:
        return f"was not compiled within {WAIT_LIMIT_S:g} s, which is the limit; the machine is busy"
    return None


def _judge(result: Future[Matcher], wanted: StructuredOutputs, field: str | None) -> None:
    error = result.exception()
    if isinstance(error, GrammarRefused):
        raise InvalidRequest(field or wanted.field, str(error))
    if error is not None:
        raise error
