"""Makes short messages of the errors of llguidance, the grammar library."""

import re

MAX_ERROR_CHARS = 500
_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
ONE_OF_REFUSED = "oneOf constraints are not supported"  # llguidance's message goes on with the name of its own option
ONE_OF_ADVICE = (
    "two schemas of a oneOf can hold for the same value; with structured_outputs.coerce_one_of or --coerce-one-of it is"
    " taken for anyOf"
)


def shortened(error: str) -> str:
    """Return llguidance's message without verbosity marks, stack trace and, for a schema, its place in our grammar,
    limited to MAX_ERROR_CHARS."""
    text = error.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()
    if (found := _OF_SCHEMA.match(text)) is not None:
        text = re.split(r"\n +\d+ \| ", text[found.end() :])[0]
    if ONE_OF_REFUSED in text:
        return ONE_OF_ADVICE
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]} …"
