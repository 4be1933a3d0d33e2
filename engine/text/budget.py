"""What rendering a chat template may spend, and the checks that hold it to that.

Lengths are checked before the operation that would make them: afterwards the memory is gone.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError

MAX_STEPS = 1_000_000
MAX_CPU_S = 2.0  # of the rendering thread; a thousand messages take 0.02
MAX_LENGTH = 16 << 20  # characters of a text, elements of a list
MAX_PRINTED = 8 * MAX_LENGTH
MAX_INTEGER_BITS = 4096
MAX_INDENT = 64


class TooMuch(TemplateError):
    """The template spends more than a template may."""


class Budget:
    """What one rendering has spent. It lives in the rendering's context: several threads may render at once."""

    def __init__(self) -> None:
        self._steps = self._printed = 0
        self._deadline = time.thread_time() + MAX_CPU_S

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch(f"more than {MAX_STEPS} loop rounds and calls")
        if self._steps % 64 == 0 and time.thread_time() > self._deadline:
            raise TooMuch(f"more than {MAX_CPU_S:g} s of computing")

    def print(self, length: int) -> None:
        self._printed += length
        if self._printed > MAX_PRINTED:
            raise TooMuch(f"more than {MAX_PRINTED} characters printed")


def check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TooMuch(f"a text or list of more than {MAX_LENGTH} elements")


def check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TooMuch(f"an integer of more than {MAX_INTEGER_BITS} bits")


def check_sum(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        check_length(len(left) + len(right))


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            check_length(len(sequence) * count)


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * right)


def check_format(left: Any, right: Any) -> None:
    """`text % values`; between numbers it is the remainder."""
    if not isinstance(left, str):
        return
    if re.search(r"%(\([^)]*\))?[-#0 +\d.]*(\*|\d{4})", left):
        raise TooMuch("a field width of more than 999 characters")
    values = right.values() if isinstance(right, dict) else right if isinstance(right, tuple) else (right,)
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    check_length(len(left) + left.count("%") * longest)


def check_join(separator: str, items: list[Any]) -> None:
    check_length(sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items))


def check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_length(len(text) + text.count(old) * max(len(new) - len(old), 0))


def check_indent(indent: Any) -> None:
    size = len(indent) if isinstance(indent, str) else indent
    if isinstance(size, int) and size > MAX_INDENT:
        raise TooMuch(f"an indent of more than {MAX_INDENT} characters")


BINOP_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": check_sum,
    "*": check_product,
    "**": check_power,
    "%": check_format,
}
