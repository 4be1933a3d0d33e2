"""Calls as models write them are read, however they are cut."""

from itertools import combinations

import pytest

from tests.engine.tools.test_reader import BAD, cuts
from tests.support.refusals import hardest
from tests.support.tool_samples import FORMATS, calls_of, read
from tests.support.written import GOOD, NO_CALLS, QUOTED, WRITTEN, Sample

READ = {name: [*GOOD.get(name, []), *WRITTEN[name], *QUOTED.get(name, [])] for name in FORMATS}
BY_FORMAT = pytest.mark.parametrize("name", FORMATS)
CERTAIN = pytest.mark.parametrize("certain", [False, True], ids=["free", "held"])
MAX_PAIRS_CHARS = 48  # of a text that is cut at every pair of places


@BY_FORMAT
@CERTAIN
@pytest.mark.parametrize("samples", [GOOD, WRITTEN, QUOTED], ids=["good", "written", "quoted"])
def test_calls_are_read_as_models_write_them(name: str, certain: bool, samples: dict[str, list[Sample]]) -> None:
    for text, content, calls in samples.get(name, []):
        assert read([text], calls_of(name), certain=certain) == ("", content, calls), text


@pytest.mark.parametrize("name", NO_CALLS)
def test_a_text_without_a_call_is_content_to_the_letter(name: str) -> None:
    for text in NO_CALLS[name] + (BAD if name == "hermes" else []):
        assert read([text], calls_of(name)) == ("", text, []), text
        assert read([f"so {text} and "], calls_of(name)) == ("", f"so {text} and ", [])


@pytest.mark.parametrize("name", hardest(FORMATS, "hermes"))
@pytest.mark.parametrize("certain", hardest([False, True], False), ids=["free", "held"])
def test_a_text_gives_the_same_calls_and_content_however_it_is_cut(name: str, certain: bool) -> None:
    """In two, short texts in three, in pieces of one length as steps with several tokens bring them, and at random."""
    for text in [text for text, _, _ in READ[name]] + NO_CALLS.get(name, []) + (BAD if name == "hermes" else []):
        whole = read([text], calls_of(name), certain=certain)
        ways = cuts(text, len(text))
        ways += [[text[at : at + size] for at in range(0, len(text), size)] for size in (2, 3, 7, 16)]
        if len(text) <= MAX_PAIRS_CHARS:
            ways += [[text[:a], text[a:b], text[b:]] for a, b in combinations(range(1, len(text)), 2)]
        for pieces in ways:
            assert read(pieces, calls_of(name), certain=certain) == whole, pieces
