"""The pages are right about flags, files and commands, and start-up failures print what docs/quickstart.md says."""

import json
import re
import socket
from pathlib import Path

import pytest

from penstock import cli
from penstock.engine.engine_options import EngineOptions
from penstock.engine.model_files import DEFAULT_NAME
from penstock.engine.options import options_of
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.vllm_options import IGNORED, REPLACED, REPLACED_SAMPLING
from tests.docs.configuration import PAGE, page, parsers
from tests.support.default_file import needs_model
from tests.support.programs import printed

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FOLDERS = (
    *("engine", "executor", "cache", "router", "eplb", "prove"),
    *("csrc", "src", "tests", "benchmarks", "deploy", "docs"),
)
FILE = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+\.\w+)")
BARE_FILE = re.compile(r"`([\w-]+\.(?:py|c|h|js|json|md))`")
CLASS = re.compile(r"(?<![…\w])[A-Z][a-z\d]+[A-Z]\w*")
# Files of models on the hub, and classes of other programs.
FOREIGN_FILES = {"config.json", "generation_config.json", "quantize_config.json"}
FOREIGN_CLASSES = {"AuthenticationError"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_of_flags_has_the_help_texts_of_the_commands() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run: python -m tests.docs.configuration"


def test_every_page_is_linked_from_another_one() -> None:
    links = {(page, page.parent / target) for page in PAGES for target in LINK.findall(page.read_text())}
    linked = {target.resolve() for page, target in links if target.resolve() != page}
    assert [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in linked] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist_and_python_compiles(path: Path) -> None:
    text = path.read_text()
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []
    assert sorted(name for name in set(FILE.findall(text)) if not (ROOT / name).exists()) == []
    for language, code in BLOCK.findall(text):
        if language == "python":
            compile(code, path.name, "exec")
            assert set(re.findall(r'model="([^"]+)"', code)) <= {DEFAULT_NAME}, "the model that is served by default"


def test_classes_and_files_that_pages_name_without_a_folder_exist() -> None:
    """Classes stand in backticks or in diagrams, which are blocks without a language that are no commands."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    names = FOREIGN_FILES | {path.name for path in [*files, *ROOT.glob("*")]}
    code = "\n".join(path.read_text() for path in files if path.suffix in {".py", ".c", ".h", ".json"})
    words = FOREIGN_CLASSES | set(re.findall(r"\w+", code))
    for path in PAGES:
        text = path.read_text()
        quoted = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
        diagrams = [block for language, block in BLOCK.findall(text) if not language and "─" in block]
        assert {name for part in [*quoted, *diagrams] for name in CLASS.findall(part)} - words == set(), path.name
        assert set(BARE_FILE.findall(text)) - names == set(), path.name


@pytest.mark.slow
@needs_model
def test_the_offline_example_of_the_readme_runs() -> None:
    code = next(code for language, code in BLOCK.findall((ROOT / "README.md").read_text()) if language == "python")
    assert len(printed(code).splitlines()) >= 2


KNOWN = dict(parsers())


def test_every_command_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in cli._COMMANDS if f"penstock {name}" not in text] == []


def test_the_page_for_users_of_vllm_names_ignored_and_replaced_flags() -> None:
    text = (ROOT / "docs" / "from-vllm.md").read_text()
    ignored = [*("--" + name.replace("_", "-") for name in IGNORED | REPLACED), *REPLACED_SAMPLING]
    kinds = (ServerConfig, EngineOptions)
    seconds = [word for kind in kinds for option in options_of(kind) for word in option.words[1:]]
    assert len(seconds) >= 8 and [word for word in (*ignored, *seconds) if f"`{word}" not in text] == []


@pytest.mark.parametrize("command", ["penstock serve", "penstock route"])
def test_servers_listen_to_this_machine_alone_unless_told_otherwise(command: str) -> None:
    needed = ["--backend", "http://127.0.0.1:1"] if command == "penstock route" else []
    assert KNOWN[command].parse_args(needed).host == "127.0.0.1"


ROWS = re.findall(r"^\| `penstock (serve[^`]*)` \| (.*?) \|", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE)
SLOW = re.compile("max-model-len|device|tensor-parallel-size|kv-cache-bytes")  # seconds each: they import torch
assert len(ROWS) >= 10, "the table of the page cannot be read"
CASES = [pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * bool(SLOW.search(row[0]))) for row in ROWS]


@needs_model
@pytest.mark.parametrize(("command", "message"), CASES)
def test_a_failed_start_prints_the_message_on_the_page(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"PORT": str(taken.getsockname()[1]), "DIR": str(tmp_path)}
        values |= {"EMPTY": str(tmp_path / "empty"), "NO_WEIGHTS": str(tmp_path / "no_weights")}
        code = cli.main([values.get(word, word) for word in command.split()])
        expected = message.replace("PORT", values["PORT"])
    assert code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
