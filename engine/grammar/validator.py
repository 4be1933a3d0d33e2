"""Tells the server whether llguidance accepts a grammar, before a request with it is submitted to the core.

A hostile grammar can take seconds and recurse deeply, so each check has a thread of its own with a large stack. Checks
leave out the vocabulary: the core may still refuse a grammar for its masks.
"""

import asyncio
from concurrent.futures import Future

from penstock.engine.config import COMPILE_LIMIT_S
from penstock.engine.grammar.library import LIMITS, shortened, start_thread

MAX_CHECKS = 2  # at once, so that one slow grammar does not delay the others


class Validator:
    """Validates grammars, a few at a time. A valid grammar of a hundred tools takes milliseconds."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_CHECKS)

    async def refusal(self, source: str) -> str | None:
        """Return why the grammar is refused, or None."""
        await self._turns.acquire()
        # The turn ends with the check, not with a request whose client disconnects: threads cannot be stopped.
        return await asyncio.shield(asyncio.ensure_future(self._check(source)))

    async def _check(self, source: str) -> str | None:
        result: Future[str] = Future()
        result.set_running_or_notify_cancel()
        try:
            start_thread(lambda: _validate(source, result))
            async with asyncio.timeout(COMPILE_LIMIT_S):
                return await asyncio.wrap_future(result) or None
        except TimeoutError:
            return f"not validated within {COMPILE_LIMIT_S:g} s, which is the limit"
        finally:
            self._turns.release()


def _validate(source: str, result: Future[str]) -> None:
    try:
        from llguidance import LLMatcher, LLParserLimits  # in the thread, since the import takes half a second

        result.set_result(shortened(LLMatcher.validate_grammar(source, limits=LLParserLimits(**LIMITS))))
    except BaseException as error:  # top of the thread; a panic in the library is no Exception
        is_plain = isinstance(error, Exception)
        result.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
