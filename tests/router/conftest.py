"""A replica that answers as a test wants, for all tests of a file."""

from collections.abc import Iterator

import pytest

from tests.support.router_stub import Stub, ok, stub


@pytest.fixture(scope="module")
def backend() -> Iterator[Stub]:
    with stub() as started:
        yield started


@pytest.fixture(autouse=True)
def usual_answer(request: pytest.FixtureRequest) -> None:
    """Let the replica of the file forget the answer of the test before."""
    if "backend" in request.fixturenames:
        request.getfixturevalue("backend").answer = ok
