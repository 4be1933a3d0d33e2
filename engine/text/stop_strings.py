"""Finds the first stop string in a streamed text and holds back only text that could become a stop string.

The result does not depend on how the text is split into pieces: the string that is complete first wins, and of several
that end at the same character, the longest. A character costs a few steps for each string: the text held back becomes
shorter by every length that is tried in vain.
"""

from collections.abc import Callable, Sequence

from penstock.engine.text.tools.scan import num_held

# Given the next text of an answer, returns whether stop strings that end in it apply.
StopCondition = Callable[[str], bool]


class StopStrings:
    """The matching state of one text. Once `matched` is set, the text has ended and nothing more may be pushed."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return the text that can be output now. If `may_stop` is false, stop strings that end in `text` are ignored,
        but a match may begin in it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        num_before, pending = len(self._held), self._held + text
        ends = []
        for stop in self._stops if may_stop else ():
            place = pending.find(stop, max(0, num_before - len(stop) + 1))  # one that ends in `text`
            if place >= 0:
                ends.append((place + len(stop), -len(stop), stop))
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return pending[: end if self._include else end - len(self.matched)]
        cut = len(pending) - num_held(pending, 0, self._stops)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return the text held back so far; call it if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held
