"""One word per thing: what docs/glossary.md rules out does not come back, and no name stands for two things."""

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "executor", "cache", "eplb", "router")
READ = (".py", ".c", ".h", ".js", ".html", ".css", ".md")
# They quote what was, what others say, or the words themselves.
EXCEPT = ("docs/glossary.md", "docs/log.md", "CHANGELOG.md", "tests/test_words.py", "benchmarks/results/")


def files(*folders: str) -> list[Path]:
    """What git knows or would know of: no build output."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if name.endswith(READ) and (ROOT / name).is_file()]


def ruled_out() -> list[str]:
    rows = re.findall(r"^\|.*\|.*\|(.*)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[2:]
    return [word.strip() for row in rows for word in row.split(",") if word.strip()]


def test_words_that_the_glossary_rules_out_stand_nowhere() -> None:
    words = re.compile(rf"\b({'|'.join(ruled_out())})\b", re.IGNORECASE)
    found = []
    for path in files():
        name = str(path.relative_to(ROOT))
        if not name.startswith(EXCEPT):
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [f"{name}:{number}: {hit[0]}" for number, line in lines for hit in words.finditer(line)]
    assert found == []


def test_the_glossary_rules_words_out() -> None:
    assert {"nobody", "under way", "news"} <= set(ruled_out())


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places = defaultdict(list)
    for path in files(*ROOMS):
        if path.suffix == ".py":
            classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
            for node in classes:
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_name_stands_twice_in_a_room() -> None:
    for room in ROOMS:
        names = Counter(path.name for path in files(room) if path.name != "__init__.py")
        assert [name for name, count in names.items() if count > 1] == []
