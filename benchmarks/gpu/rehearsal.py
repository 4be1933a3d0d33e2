"""A GPU stood in for on a CPU, so that what runs there for the first time has run somewhere before: the tests' made-up
graphs, and an outbox whose copies are made when they are asked for, as a stream would make them at the earliest."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def pretend_a_gpu() -> Iterator[None]:
    """Whatever is opened inside goes the ways that it would there."""
    from tests.executor import test_graphs

    with pytest.MonkeyPatch.context() as patch:
        test_graphs.pretend_a_gpu(patch, test_graphs.Recorder)
        yield
