"""Limits, threads and error messages for llguidance, the grammar library. The core and the server (validator.py) share them.

`LIMITS` bounds the cost of a hostile schema to about 45 seconds of one core. Recursion may be as deep as the text is long,
so the threads have a large stack (pages that are never touched cost nothing).
"""

import re
import threading
from collections.abc import Callable
from typing import Any

STACK_BYTES = 512 << 20  # a chain of 20,000 rules, the most that fit in 256 KiB of text, uses a third of it
LIMITS: dict[str, Any] = {  # arguments of llguidance.LLParserLimits
    # The work is quadratic in the length of a chain of optional parts: with the default of a million, 256 KiB of them
    # keep a thread busy for about 12 minutes. A hundred tools of a realistic size need 66,000.
    "initial_lexer_fuel": 80_000,
    # The library's default: a text of 20,000 characters in a schema needs 11 states of 650 bytes per token.
    "max_lexer_states": 250_000,
    "step_max_items": 50_000,  # one mask of an ambiguous grammar took 105 ms with 49,152 tokens, 245 ms with 152,064
    "step_lexer_fuel": 200_000,  # the slowest valid mask took 60 ms: at most 50 words in 500 characters, 152,064 tokens
    "verbose_errors": False,
}
MAX_ERROR_CHARS = 500
_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
ONE_OF_REFUSED = "oneOf constraints are not supported"  # llguidance's message goes on with the name of its own option
ONE_OF_ADVICE = (
    "two schemas of a oneOf can hold for the same value; with structured_outputs.coerce_one_of or --coerce-one-of it is"
    " taken for anyOf"
)


def start_thread(work: Callable[[], None]) -> None:
    """Start a daemon thread whose stack is large enough for the deepest grammar."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=work, name="grammars", daemon=True).start()
    finally:
        threading.stack_size(before)


def shortened(error: str) -> str:
    """Return llguidance's message without verbosity marks, stack trace and, for a schema, its place in our grammar,
    limited to MAX_ERROR_CHARS."""
    text = error.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()
    if (found := _OF_SCHEMA.match(text)) is not None:
        text = re.split(r"\n +\d+ \| ", text[found.end() :])[0]
    if ONE_OF_REFUSED in text:
        return ONE_OF_ADVICE
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]} …"
