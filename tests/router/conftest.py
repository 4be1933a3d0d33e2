"""A replica that answers what a test says, for all tests of a file."""

from collections.abc import Iterator

import pytest

from tests.support.router_stub import Stub, stub


@pytest.fixture(scope="module")
def backend() -> Iterator[Stub]:
    with stub() as started:
        yield started
