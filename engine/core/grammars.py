"""Protocols of what the core needs of grammars: a compiler, the state of a sequence, and the masks of a step.

`engine/grammar` implements the protocols. The core knows neither tokenizers nor the library behind them.
"""

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.engine.config import COMPILE_LIMIT_S
from penstock.executor.protocol import Array


class GrammarState(Protocol):
    """The position of one sequence in its grammar."""

    @property
    def eos_ids(self) -> AbstractSet[int]: ...

    @property
    def is_complete(self) -> bool:
        """True if only an end token may follow, or one has been consumed."""

    @property
    def error(self) -> str:
        """Why no token can follow, or an empty text."""

    def advance(self, tokens: list[int]) -> bool:
        """Consume the sequence's next tokens; return False if the grammar does not allow them."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, in that order."""


class GrammarRefused(ValueError):
    """The grammar cannot be compiled; the message says why."""


@dataclass(eq=False)
class CompileJob:
    source: str
    result: Future[GrammarState] = field(default_factory=Future)  # the initial state, or GrammarRefused
    began_s: float | None = None  # set when a thread has started the job and the vocabulary is loaded

    def limit_passed(self) -> str | None:
        """Return a message naming the limit that compilation has exceeded, or None."""
        is_late = self.began_s is not None and time.monotonic() - self.began_s > COMPILE_LIMIT_S
        if is_late and not self.result.done():
            return f"was not compiled within {COMPILE_LIMIT_S:g} s, which is the limit"
        return None


class StepMasks(NamedTuple):
    """The masks of the constrained rows of one step."""

    rows: Array  # [n] int32, index of each row in the step
    bits: Array  # [n, words] int32, contiguous; token t may be sampled if bit t % 32 of word t // 32 is set
    ended: list[int]  # rows where only an end token may follow; their masks allow every token and are not used
    errors: dict[int, str]  # rows whose mask could not be computed, with the reason; their masks are not used either


# Fills the masks of one step at a time, for the indices of its constrained rows and their states, which must not change
# until it has returned.
FillMasks = Callable[[Sequence[tuple[int, GrammarState]]], StepMasks]


class GrammarCompiler(Protocol):
    """Compiles grammars in threads of its own and caches them."""

    def cached(self, source: str) -> GrammarState | None:
        """Return a fresh state if the grammar is cached."""

    def start(self, source: str) -> CompileJob:
        """Queue a grammar for compilation; raise RuntimeError if no thread starts."""

    def give_up(self, job: CompileJob) -> None:
        """Cancel a job that no request waits for any more."""

    def warm(self) -> None:
        """Prepare in the background for the first grammar. Further calls do nothing."""

    def mask_filler(self, max_rows: int) -> FillMasks:
        """Return a function that fills the masks of at most `max_rows` states of this compiler."""

    def close(self) -> None: ...
