"""Tracks the position of one sequence in its grammar. The scheduler advances it through the protocol of
engine/core/grammars.py; masks.py computes masks from it.
"""

from array import array
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from penstock.engine.grammar.library import shortened
from penstock.engine.grammar.vocabulary import GrammarVocabulary

if TYPE_CHECKING:  # llguidance takes long to import, and most engines never need it
    from llguidance import LLMatcher

RENEW_LIMIT_S = 0.1  # a grammar that took longer to compile is not recompiled while a step waits
LEXER_IS_FULL = "too many states"  # part of llguidance's message; its stop reason does not tell this error from others


class Lexer:
    """The lexer state that all copies of one compiled grammar share. Lexer states are built on demand and never freed.

    One long answer can therefore use them up for all copies; `compile` makes a grammar with a separate lexer."""

    def __init__(self, compile: "Callable[[], LLMatcher]", took_s: float) -> None:
        self.compile, self.took_s = compile, took_s
        self.num_tokens = 0  # consumed by all copies together
        self.is_full = False


class Matcher:
    """The grammar state of one sequence. It survives preemption, since the host knows its tokens. Not thread-safe."""

    def __init__(self, backend: "LLMatcher", vocabulary: GrammarVocabulary, lexer: Lexer) -> None:
        self.backend, self.vocabulary = backend, vocabulary
        self._lexer: Lexer | None = lexer  # the shared lexer; None after `renew`, which happens at most once
        self._taken = array("i")

    def copy(self) -> "Matcher":
        """Return a matcher in the initial state, which this one must be in."""
        assert self._lexer is not None and not self._taken
        return Matcher(self.backend.deep_copy(), self.vocabulary, self._lexer)

    def is_worn_after(self, num_tokens: int) -> bool:
        """Return whether the shared lexer is full, or has consumed this many tokens."""
        return self._lexer is None or self._lexer.is_full or self._lexer.num_tokens >= num_tokens

    def advance(self, tokens: list[int]) -> bool:
        """Consume the sequence's next tokens; return False if they cannot follow or exceed llguidance's limits."""
        if not self.backend.consume_tokens(tokens) and not (self.renew() and self.backend.consume_tokens(tokens)):
            return False
        self._taken.extend(tokens)
        if self._lexer is not None:
            self._lexer.num_tokens += len(tokens)
        return True

    def renew(self) -> bool:
        """Switch to a separate lexer if the shared one is full; return False if it is not or cannot be replaced."""
        lexer, self._lexer = self._lexer, None
        if lexer is None or LEXER_IS_FULL not in self.backend.get_error():
            return False
        lexer.is_full = True
        if lexer.took_s > RENEW_LIMIT_S:
            return False
        self.backend = lexer.compile()
        return self.backend.consume_tokens(self._taken.tolist())

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, split as the tokenizer splits their text. The last piece is
        left out if it could still be split differently. Takes 2 µs if nothing is forced."""
        return self.backend.compute_ff_tokens()

    @property
    def eos_ids(self) -> AbstractSet[int]:
        return self.vocabulary.eos_ids

    @property
    def is_complete(self) -> bool:
        """True if only an end token may follow, or one has been consumed."""
        return self.backend.is_stopped()

    @property
    def error(self) -> str:
        return shortened(self.backend.get_error())
