"""The front's side of constrained requests: is there a grammar for what is asked, found out before anything runs.

The core compiles the same text again; what passed here passes there. A grammar that takes longer than
`COMPILE_LIMIT_S` is refused: its thread goes on to the end that llguidance's own limits set, and disturbs nobody.
"""

import asyncio
from collections.abc import Collection
from concurrent.futures import Future

from penstock.engine.grammar.compiler import Compiler, GrammarRefused, Job
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.source import grammar_source
from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs

COMPILE_LIMIT_S = 2.0  # from when a thread takes it up


class GrammarCheck:
    """`special_tokens`: the texts of the tokenizer's. Raises InvalidRequest naming `field`, or the field of `wanted`."""

    def __init__(self, compiler: Compiler, special_tokens: Collection[str] = ()) -> None:
        self._compiler, self._special_tokens = compiler, special_tokens

    def now(self, wanted: StructuredOutputs, field: str | None = None) -> str:
        """The grammar's text, for the core; waits until it is compiled."""
        source = grammar_source(wanted, self._special_tokens, field)
        if self._compiler.cached(source) is None:
            job = self._compiler.start(source)
            job.began.result()
            try:
                job.result.exception(COMPILE_LIMIT_S)
            except TimeoutError:
                self._compiler.give_up(job)
                raise _too_slow(wanted, field) from None
            _judge(job.result, wanted, field)
        return source

    async def soon(self, wanted: StructuredOutputs, field: str | None = None) -> str:
        """The same, without holding up the event loop."""
        source = grammar_source(wanted, self._special_tokens, field)
        if self._compiler.cached(source) is None:
            job = self._compiler.start(source)
            try:
                await asyncio.wrap_future(job.began)
                if not await _is_done_in_time(job):
                    raise _too_slow(wanted, field)
            finally:
                self._compiler.give_up(job)  # unless it is done
            _judge(job.result, wanted, field)
        return source

    def warm(self) -> None:
        self._compiler.warm()

    def close(self) -> None:
        self._compiler.close()


async def _is_done_in_time(job: Job) -> bool:
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Not wrap_future: its exception would have to be fetched even when nobody waits any more.
    job.result.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await asyncio.wait_for(done.wait(), COMPILE_LIMIT_S)
    except TimeoutError:
        return False
    return True


def _judge(result: Future[Matcher], wanted: StructuredOutputs, field: str | None) -> None:
    error = result.exception()
    if isinstance(error, GrammarRefused):
        raise InvalidRequest(field or wanted.field, str(error))
    if error is not None:
        raise error


def _too_slow(wanted: StructuredOutputs, field: str | None) -> InvalidRequest:
    return InvalidRequest(
        field or wanted.field, f"takes longer than {COMPILE_LIMIT_S:g} s to compile, which is the limit"
    )
