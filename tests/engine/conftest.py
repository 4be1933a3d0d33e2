import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a model's folder with as little as the oracle needs."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


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
