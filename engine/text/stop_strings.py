"""Finds the first stop string in a streamed text and holds back only text that could become a stop string.

Each string is matched with its Knuth-Morris-Pratt automaton, so a character costs a few steps for any strings. With up
to 16 strings of 1,024 characters, a search that starts over at every token would let one request slow down all others.
The result does not depend on how the text is split into pieces: the string that is complete first wins, and of several
that end at the same character, the longest.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The matching state of one text. Once `found` is set, the text has ended and nothing more may be pushed."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self.found: str | None = None
        self._followers = [_Follower(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return the text that can be output now. If `may_stop` is false, stop strings that end in `text` are ignored,
        but a match may begin in it."""
        ends = []
        for follower in self._followers:
            end = follower.follow(text, may_stop)
            if end is not None:
                ends.append((end, -len(follower.stop), follower.stop))
        pending = self._held + text
        if ends:
            end, _, self.found = min(ends)
            end += len(self._held)
            self._held = ""
            return pending[: end if self._include else end - len(self.found)]
        keep = max((follower.matched for follower in self._followers), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Return the text held back so far; call it if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Follower:
    """Tracks the longest prefix of one stop string that the text so far ends with; `matched` is its length."""

    __slots__ = ("_back", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._back = _fallbacks(stop)

    def follow(self, text: str, may_stop: bool) -> int | None:
        """Return the position in `text` after the first full match; None if there is none or `may_stop` is false."""
        stop, back, matched = self.stop, self._back, self.matched
        if not matched and stop[0] not in text:
            return None
        for place, character in enumerate(text, 1):
            while matched and stop[matched] != character:
                matched = back[matched]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                if may_stop:
                    return place
                matched = back[matched]
        self.matched = matched
        return None


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return the KMP failure table: entry n is the length of the longest proper prefix of `stop` that is also a suffix
    of its first n characters. Cached, because most requests of a server use the same few stop strings."""
    back = [0, 0]
    for character in stop[1:]:
        matched = back[-1]
        while matched and stop[matched] != character:
            matched = back[matched]
        back.append(matched + (stop[matched] == character))
    return tuple(back)
