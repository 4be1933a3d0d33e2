"""Lines about what takes a while at the start."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def quarters(items: Iterable[Item], total: int, line: str, say: Callable[[str], None]) -> Iterator[Item]:
    """Pass `total` items on, and say after each quarter of them how many it has been, as in "Loaded {} of {} layers"."""
    for number, item in enumerate(items, 1):
        yield item
        if number * 4 // total > (number - 1) * 4 // total:
            say(line.format(number, total))
