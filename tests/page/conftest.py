from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.running_server import started


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from tests.support import page_browser  # without Playwright, this import skips the file that is collected

    with page_browser.started() as browser:
        yield browser


slow = started(lambda: FakeEngine(delay_s=0.02), "function")
