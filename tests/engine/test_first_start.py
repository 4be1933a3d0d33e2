"""What a first start says of the work that later ones find done."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.first_start import start_note
from penstock.engine.front.client import AsyncEngine
from penstock.engine.messages import StartCost
from penstock.executor.protocol import ExecutorConfig

IMPORTING = """
import sys
from penstock.engine.core.first_start import CompileClock
clock = CompileClock()
clock.install()
sys.path.insert(0, sys.argv[1])
import one, two
cost = clock.cost()
print(cost.num_compiled, cost.compile_s > 0)
"""
CORE = """
import sys
from penstock.engine.core.process import main
from tests.support.oracle import OracleExecutor

def open_executor(config, progress):
    import one, two
    return OracleExecutor(config)

if __name__ == "__main__":
    sys.exit(main(open_executor))
"""


def imported(folder: Path, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", IMPORTING, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_files_are_counted_at_the_first_start_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    assert imported(tmp_path, PYTHONDONTWRITEBYTECODE="1") == "0 False", "nothing is kept, so nothing is promised"
    assert imported(tmp_path) == "2 True"
    assert imported(tmp_path) == "0 False"


def test_the_line_names_what_was_paid_once_and_is_left_out_where_that_is_little() -> None:
    assert start_note(StartCost(3, 0.1, 2**20)) is None
    line = start_note(StartCost(1812, 2.34, 312 * 2**20))
    assert line == (
        "This start compiled 1,812 Python files in 2.3 s and read 312 MiB from the disk, which the next one usually need not."
    )
    assert (
        start_note(StartCost(1, 1.0))
        == "This start compiled 1 Python files in 1.0 s, which the next one usually need not."
    )


def test_the_engine_knows_what_its_core_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "core_with_files.py").write_text(CORE)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    async def start() -> StartCost:
        config = EngineConfig(executor=ExecutorConfig(max_model_len=64), scheduler=SchedulerConfig())
        engine = AsyncEngine(config, core="core_with_files")
        await engine.start()
        await engine.close()
        return engine.start_cost

    first, second = (asyncio.run(start()) for _ in range(2))
    assert first.num_compiled >= 2 and first.compile_s > 0
    assert (second.num_compiled, second.compile_s) == (0, 0.0)
