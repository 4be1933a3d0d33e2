"""The table over several servers counts what each could be asked, and is not written if it only flatters us."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import grid
from tests.support import refusals
from tests.support.default_file import needs_model

SERVER = """
import asyncio, sys
from tests.support.reference_server import ReferenceServer
async def serve():
    async with ReferenceServer(sys.argv[1], without=sys.argv[3:], port=int(sys.argv[2])):
        await asyncio.sleep(3600)
asyncio.run(serve())
"""
PAGE = f"before\n{grid.BEGIN}an old table\n{grid.END}after\n"


@needs_model
def test_servers_are_asked_in_turn_and_the_table_is_written(tmp_path: Path) -> None:
    page = tmp_path / "trust.md"
    page.write_text(PAGE)

    def server(name: str, *words: str) -> list[str]:
        return ["--server", f"{name}={shlex.join([sys.executable, '-c', SERVER, *words])}"]

    servers = [*server("Right", "", "{port}"), *server("Wrong", "one-seed", "{port}", "tools")]
    cases = ["--case", "seed-repeats", "--case", "tool-arguments", "--case", "lmcache-4492"]
    words = [*servers, "--write", str(page), "--", *cases]
    subprocess.run([sys.executable, "-m", "tests.grid", *words], check=True, cwd=grid.ROOT, timeout=120)
    text = page.read_text()
    assert text.startswith("before\n<!-- grid -->\n2") and text.endswith("<!-- end of grid -->\nafter\n")
    assert "| Right unknown | 3 of 3 | none | nothing | nothing |" in text
    assert "| Wrong unknown | 2 of 3 | 1 seed | tool-arguments | nothing |" in text and "an old table" not in text
    assert f"`penstock prove URL {' '.join(cases)}`" in text


@pytest.mark.parametrize(("num_asked", "is_fair"), refusals.cases(__file__, "fair tables"))
def test_a_table_in_which_only_ours_is_whole_is_not_fair(num_asked: dict[str, int], is_fair: bool) -> None:
    results: dict[str, dict[str, Any]] = {name: {"asked": number, "checks": 9} for name, number in num_asked.items()}
    assert grid.is_fair(results) == is_fair


def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no model ' + sys.argv[1])", "{model}"])
    with (
        pytest.raises(SystemExit, match="did not start") as error,
        grid.serving(command, {"model": "a"}, tmp_path),
    ):
        pass
    assert "no model a" in str(error.value)
