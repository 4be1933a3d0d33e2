"""Stop strings: found wherever they are cut, and no more text held back than could become one."""

import random

import pytest

from penstock.engine.text.stop_strings import StopStrings
from tests.support.refusals import cases


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None, str]:
    """What each push gave, the stop string, and what was held back at the end."""
    text = StopStrings(stops, include)
    given = []
    for piece in pieces:
        given.append(text.push(piece))
        if text.found is not None:
            return given, text.found, ""
    return given, None, text.flush()


@pytest.mark.parametrize(("stops", "pieces", "given", "found", "held"), cases(__file__, "stop strings"))
def test_text_is_given_as_soon_as_it_cannot_become_a_stop_string(
    stops: list[str], pieces: list[str], given: list[str], found: str | None, held: str
) -> None:
    assert run(stops, pieces) == (given, found, held)


def test_a_string_that_ends_too_early_is_passed_over_but_may_begin_early() -> None:
    text = StopStrings(["aba"])
    assert text.push("xaba", may_stop=False) == "xab"
    assert text.push("ba") == ""
    assert text.found == "aba"
    text = StopStrings(["xaby", "ab"])
    assert text.push("xab", may_stop=False) == ""
    assert (text.push("z"), text.found) == ("xabz", None)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By brute force: the end and the name of the string that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def longest_hold(text: str, stops: list[str]) -> int:
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_are_cut_where_brute_force_cuts_them_and_hold_back_the_least(include: bool) -> None:
    rng = random.Random(0)
    found_count = 0
    for _ in range(4000):
        alphabet = "ab" if rng.random() < 0.5 else "abc\n"
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        whole = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        expected = first_stop(whole, stops)
        text = StopStrings(stops, include)
        at, given = 0, ""
        while at < len(whole) and text.found is None:
            size = rng.randint(0, 5)
            given += text.push(whole[at : at + size])
            at += size
            if text.found is None:
                assert given == whole[: len(whole[:at]) - longest_hold(whole[:at], stops)]
        if expected is None:
            assert (text.found, given + text.flush()) == (None, whole)
        else:
            found_count += 1
            end, stop = expected
            assert (text.found, given) == (stop, whole[: end if include else end - len(stop)])
    assert 1000 < found_count < 3900
