"""Progress lines for long operations during startup."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def quarters(items: Iterable[Item], total: int, line: str, say: Callable[[str], None]) -> Iterator[Item]:
    """Yield `total` items; after each quarter, pass `line` ("Loaded {} of {} layers") with the counts to `say`."""
    for number, item in enumerate(items, 1):
        yield item
        if number * 4 // total > (number - 1) * 4 // total:
            say(line.format(number, total))
