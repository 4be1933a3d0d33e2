"""Gives each test process one thread of torch, which has to be said before torch is imported.

`make test` runs three processes on two cores, and the models of most tests are so small that waking a second thread takes
longer than the work: with one thread the same tests take about half of the CPU time. Tests of what threads share ask for
more (the fixture `two_threads`).
"""

import asyncio
import functools
import gc
import inspect
import os
import signal
import ssl
from collections.abc import Iterator

import pytest

from tests.support.fork_server import ROOT, forking

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes find the modules of the tests, too: they do not search the current directory.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{ROOT / 'src'}", f"{ROOT}", os.environ.get("PYTHONPATH"))))
# A shell's background job ignores Ctrl-C, as would the processes that tests end with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Seconds after which a test hangs, on a busy machine as well; pyproject.toml has the limit of tests without a marker.
LIMITS_S = {"slow": 1800, "nightly": 3600, "soak": 7200}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, limit_s in LIMITS_S.items():
            if item.get_closest_marker(marker) is not None:
                # In front of one that the function has for its fast cases: the first of them is in force.
                item.add_marker(pytest.mark.timeout(limit_s), append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt all that was imported and collected from garbage collection: a full one takes a second otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # the defaults took 4 % of the time


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Fork the engine cores over the oracle instead of starting them, since most of a start is imports, and let all HTTP
    clients share one TLS context, since each would read the machine's certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.executor.process_life.subprocess", forking("tests.support.oracle_core"))
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in the event loop of the fixture `runner` if it uses that, else in one of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runner = pyfuncitem.funcargs.get("runner")
    run = runner.run if isinstance(runner, asyncio.Runner) else asyncio.run
    run(pyfuncitem.obj(**fixtures))
    return True
