"""Where one sequence stands in its grammar. The scheduler moves it on; the masks are made of it (masks.py)."""

from llguidance import LLMatcher

from penstock.engine.grammar.vocabulary import Vocabulary

MAX_ERROR_CHARS = 500


class Matcher:
    """Follows the tokens that the host knows, so a preemption does not concern it. Never used by two threads at once."""

    __slots__ = ("backend", "vocabulary")

    def __init__(self, backend: LLMatcher, vocabulary: Vocabulary) -> None:
        self.backend, self.vocabulary = backend, vocabulary

    def advance(self, tokens: list[int]) -> bool:
        """Take in the sequence's next tokens; False if they cannot follow, or that costs more than is allowed."""
        return self.backend.consume_tokens(tokens)

    def forced(self) -> list[int]:
        """The tokens that must follow, whatever the model would say: the grammar's only text, cut the way that the
        tokenizer cuts it. A last piece that could still be cut otherwise is left out. 2 µs if there is none."""
        return self.backend.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Nothing but an end of text may follow, or it has come."""
        return self.backend.is_stopped()

    @property
    def error(self) -> str:
        return shortened(self.backend.get_error())


def shortened(error: str) -> str:
    """llguidance's message without its remarks about verbosity and stack frames, at a length one can print."""
    text = error.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]} …"
