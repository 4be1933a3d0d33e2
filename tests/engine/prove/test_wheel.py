"""The wheel penstock-prove, built as `make prove-wheel` does and run in an environment without any package."""

import asyncio
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.reference_server import DEFECTS, ReferenceServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_needs_no_package_and_finds_every_planted_defect(tmp_path: Path) -> None:
    subprocess.run(["make", "prove-wheel"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("penstock_prove-*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python, command = tmp_path / "venv/bin/python", str(tmp_path / "venv/bin/penstock-prove")
    install = [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-index", str(wheel)]
    subprocess.run(install, check=True)

    async def run(defect: str) -> int | None:
        async with ReferenceServer(defect) as url:
            process = await asyncio.create_subprocess_exec(command, url, "--requests", "40", "--rate", "500", env={})
            return await process.wait()

    assert [asyncio.run(run(defect)) for defect in ("", "positions-shifted")] == [0, 1]
    tested = subprocess.run([command, "--self-test"], env={}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout
    assert f"kill rate: {len(DEFECTS)} of {len(DEFECTS)}, 0 false alarms" in tested.stdout
    without_url = subprocess.run([command], env={}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert without_url.returncode == 2 and "only `penstock prove` starts servers" in without_url.stderr
