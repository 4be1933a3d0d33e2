"""The position of one sequence in its grammar. The scheduler advances it; masks.py makes masks from it."""

from array import array
from collections.abc import Callable

from llguidance import LLMatcher

from penstock.engine.grammar.vocabulary import GrammarVocabulary

MAX_ERROR_CHARS = 500
RENEW_LIMIT_S = 0.1  # a grammar that took longer to compile is not compiled anew while a step waits
LEXER_IS_FULL = "too many states"  # what llguidance says then; its stop reason is that of any error


class Lexer:
    """The state that all copies of one compiled grammar share: lexer states are built as texts need them and are never freed.

    So one long answer can use them up for everybody; `compile` makes a grammar with a lexer of its own."""

    __slots__ = ("compile", "is_full", "num_tokens", "took_s")

    def __init__(self, compile: Callable[[], LLMatcher], took_s: float) -> None:
        self.compile, self.took_s = compile, took_s
        self.num_tokens = 0  # taken in by all copies
        self.is_full = False


class Matcher:
    """Follows the tokens that the host knows, so a preemption does not concern it. Never used by two threads at once."""

    __slots__ = ("_lexer", "_taken", "backend", "vocabulary")

    def __init__(self, backend: LLMatcher, vocabulary: GrammarVocabulary, lexer: Lexer) -> None:
        self.backend, self.vocabulary = backend, vocabulary
        self._lexer: Lexer | None = lexer  # shared; None: one of its own, which is not renewed again
        self._taken = array("i")

    def advance(self, tokens: list[int]) -> bool:
        """Take in the sequence's next tokens; False if they cannot follow, or that costs more than is allowed."""
        if not self.backend.consume_tokens(tokens) and not (self.renew() and self.backend.consume_tokens(tokens)):
            return False
        self._taken.extend(tokens)
        if self._lexer is not None:
            self._lexer.num_tokens += len(tokens)
        return True

    def renew(self) -> bool:
        """Continue with a lexer of its own if the shared one is full. Return False if that is not the error."""
        lexer, self._lexer = self._lexer, None
        if lexer is None or LEXER_IS_FULL not in self.backend.get_error():
            return False
        lexer.is_full = True
        if lexer.took_s > RENEW_LIMIT_S:
            return False
        self.backend = lexer.compile()
        return self.backend.consume_tokens(self._taken.tolist())

    def forced(self) -> list[int]:
        """Return the tokens that must follow whatever the model samples: the grammar's only text, cut the way that the
        tokenizer cuts it. A last piece that could still be cut otherwise is left out. 2 µs if there is none."""
        return self.backend.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end of text may follow, or it has come."""
        return self.backend.is_stopped()

    @property
    def error(self) -> str:
        return shortened(self.backend.get_error())


ONE_OF_REFUSED = "oneOf constraints are not supported"  # llguidance's words; it names an option of its own behind them
ONE_OF_ADVICE = (
    "two schemas of a oneOf can hold for the same value; with structured_outputs.coerce_one_of or --coerce-one-of it is"
    " taken for anyOf"
)


def shortened(error: str) -> str:
    """Return llguidance's message without remarks about verbosity and stack frames, cut to a printable length."""
    text = error.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()
    if ONE_OF_REFUSED in text:
        return ONE_OF_ADVICE
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]} …"
