"""Find the first stop string in a text that grows piece by piece, and hold back no more than could become one.

Each string is followed with its Knuth-Morris-Pratt automaton, so a character costs a few steps whatever the
strings are: with up to 16 strings of 1,024 characters, a search that starts over at every token would let one
request slow all others down. The result does not depend on how the text is cut: the string that is complete
first wins, and of those that end at the same character, the longest.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The state of one text. Once `found` is set, the text is over and nothing more may be pushed."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self.found: str | None = None
        self._followers = [_Follower(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return the text that is now certain to be output. Without `may_stop`, a string that ends in `text` is passed over,
        but one may begin in it."""
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
        """Return what was held back, when the text has ended otherwise."""
        held, self._held = self._held, ""
        return held


class _Follower:
    """Counts how many characters of one stop string the text so far ends with."""

    __slots__ = ("_back", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._back = _fallbacks(stop)

    def follow(self, text: str, may_stop: bool) -> int | None:
        """Return the place in `text` just behind the first full match that counts."""
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
    """Return at n the length of the longest proper prefix of `stop` that its first n characters end with. A pure function;
    cached because the choices of a request, and most requests of a server, share their few stop strings."""
    back = [0, 0]
    for character in stop[1:]:
        matched = back[-1]
        while matched and stop[matched] != character:
            matched = back[matched]
        back.append(matched + (stop[matched] == character))
    return tuple(back)
