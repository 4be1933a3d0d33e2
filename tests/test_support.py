"""The index of what the tests stand on is whole: tests/support/README.md."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "support"


def test_every_file_of_support_is_in_its_index_once() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.[hp]*") if path.name != "__init__.py")


def test_the_folders_and_files_of_tests_that_use_them_exist() -> None:
    users = re.findall(r"\| (`[^|]*`) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    named = {name for cell in users for name in re.findall(r"`(.+?)`", cell)}
    tests = FOLDER.parent
    assert {name for name in named if not any(any(at.glob(name)) for at in (tests, FOLDER, tests.parent))} == set()
