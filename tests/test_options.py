"""Every option of the command line and every keyword of `LLM(...)` changes what it configures, or is refused by name.

Mistakes on the command line are the subject of tests/test_cli.py. Help texts and docs/configuration.md are one text
(tests/docs/test_pages.py).
"""

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import numpy as np
import pytest

from penstock.cli import _COMMANDS
from penstock.engine.commands import serve
from penstock.engine.commands.bench import BENCHMARKS
from penstock.engine.config import ConfigError
from penstock.engine.engine_options import EngineOptions, engine_config, option_names
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import ModelFiles, resolve_model
from penstock.engine.options import flags_of, given_options, size_bytes
from penstock.engine.server.server_config import ServerConfig
from penstock.engine.vllm_options import IGNORED, WITH_VALUE
from penstock.router import serve as route
from penstock.router.backend import RouteError
from penstock.router.config import RouterConfig
from tests.support.fork_server import ROOT
from tests.support.refusals import cases, table

_FLAGS = json.loads(Path(__file__).with_suffix(".json").read_text())
VALUES: dict[str, str] = _FLAGS["values"]  # for flags whose type does not tell a value
NEEDS: dict[str, list[str]] = _FLAGS["needs"]  # what a flag needs beside it
READERS: dict[str, list[str]] = _FLAGS["readers"]  # the files that read the options of other commands


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return all but those that are accepted without effect, and --dry-run, which starts nothing."""
    others = ("help", "dry_run")
    return [each for each in parser._actions if each.dest not in others and each.default is not argparse.SUPPRESS]


def parser_of(command: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser


def words(action: argparse.Action) -> list[str]:
    """Return words that give the option a value other than its default."""
    value = VALUES.get(action.dest) or {int: "77", float: "0.77"}.get(action.type, "1500")  # type: ignore[call-overload]
    if not action.option_strings:
        return [value]
    if action.nargs == 0:
        is_on = not action.default and action.dest != "enable_prefix_caching"
        return [action.option_strings[0 if is_on else -1]]
    if action.choices:
        value = next(str(choice) for choice in action.choices if choice not in (action.default, "auto"))
    return [action.option_strings[-1], value]


def served(*words: str) -> Any:
    """Return what `penstock serve` opens, loads and starts, with stand-ins for files, sockets and the engine."""
    sockets, levels, template, text = Mock(return_value=[]), Mock(), Mock(), Mock()
    files = Mock(side_effect=lambda model, **_: ModelFiles("name", Path(model or "default"), "hf"))
    engine = Mock(return_value=Mock(start=AsyncMock(), close=AsyncMock()))
    lifetime = SimpleNamespace(serve=AsyncMock(return_value=0), Service=Mock())
    with (
        patch.multiple(serve, resolve_model=files, load_template=template, load_tokenizer=text, bind_sockets=sockets),
        patch.multiple(serve, AsyncEngine=engine, import_module=Mock(return_value=lifetime), log_to_stderr=levels),
        patch.multiple(serve, recommended_sampling=Mock(return_value={"top_k": 7}), _say_memory=Mock(), _say=Mock()),
    ):
        assert serve.run(parser_of(serve).parse_args(words)) == 0
    started = [stand.call_args.args for stand in (sockets, levels, engine)]
    return files.call_args, started, template.call_args.args[1:], lifetime.Service.call_args.args[3]


def routed(*words: str) -> Any:
    return route.check(parser_of(route).parse_args(words))


WALK = [
    (start, action) for command, start in ((serve, served), (route, routed)) for action in options(parser_of(command))
]


@pytest.mark.parametrize(("start", "action"), WALK, ids=lambda each: getattr(each, "dest", None) or each.__name__)
def test_every_option_changes_what_is_started(
    start: Any, action: argparse.Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough to be one\n")
    secret.chmod(0o600)
    monkeypatch.setitem(VALUES, "kv_peer_secret_file", str(secret))
    needs = NEEDS.get(action.dest, NEEDS.get(f"{start.__name__} {action.dest}", []))
    without = needs
    if action.dest in ("kv_disk_path", "kv_disk_bytes"):  # neither goes without the other
        without = [*needs, action.option_strings[-1], "2GiB" if action.dest == "kv_disk_bytes" else "/elsewhere"]
    assert start(*needs, *words(action)) != start(*without)


@pytest.mark.parametrize("name", READERS)
def test_every_option_of_the_other_commands_is_read(name: str) -> None:
    text = "".join(path.read_text() for pattern in READERS[name] for path in sorted(ROOT.glob(pattern)))
    read = {*re.findall(r"\b(?=(?:args|options|self)\.(\w+))", text), *option_names()}
    parsers = [parser_of(_COMMANDS[name].load())]
    for parser in parsers:
        for action in options(parser):
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest not in read:
                pytest.fail(f"no code reads {action.option_strings or action.dest}")


def test_every_command_is_walked() -> None:
    assert {*_COMMANDS} == {*READERS, "serve", "route"}
    assert served() == served() and routed() == routed(), "or every option would seem to change something"


def test_every_field_of_the_options_has_a_help_text_and_every_help_text_a_field() -> None:
    kinds: set[Any] = {ServerConfig, RouterConfig, serve.ModelOptions}.union(*dict(BENCHMARKS.values()).values())
    kinds |= {type(part) for kind in kinds for part in vars(kind).values() if hasattr(part, "__dataclass_fields__")}
    fields = {f"{kind.__name__}.{name}" for kind in kinds for name in kind.__dataclass_fields__}
    tables = flags_of("penstock.engine") | flags_of("penstock.router")
    flags = {f"{kind}.{name}" for kind, texts in tables.items() for name in texts}
    assert (flags - fields, fields - flags) == (set(), {*_FLAGS["no flag"]})


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "engine options"))
def test_options_on_the_command_line_are_the_same_as_keywords(text: str, expected: dict[str, Any]) -> None:
    assert given_options(parser_of(serve).parse_args(text.split()), EngineOptions) == expected


def test_names_of_vllm_that_mean_options_of_the_server_set_them() -> None:
    args = parser_of(serve).parse_args(["--shutdown-timeout", "5", "--uvicorn-log-level", "warning"])
    assert (args.drain_timeout_s, args.log_level) == (5.0, "warning")
    assert engine_config("model", {"distributed_executor_backend": "mp"}).executor.kind == "multiproc"


def test_an_ignored_option_is_named_once_by_the_command_and_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    for name in IGNORED:
        flag = "--" + name.replace("_", "-")
        parser_of(serve).parse_args([flag, "some-value"] if name in WITH_VALUE else [flag])
        shown = capsys.readouterr().err
        assert shown.startswith(f"penstock: {flag}: without effect: ") and shown.count("\n") == 1
        with pytest.warns(UserWarning, match=f"{name}: without effect") as warnings:
            engine_config("model", {name: True})
        assert len(warnings) == 1
    assert not {*IGNORED} & option_names()


@pytest.mark.parametrize("name", ["kv_cache_bytes", "kv_cache_memory_bytes"])
def test_a_keyword_may_be_written_as_its_flag_is(name: str) -> None:
    config = engine_config("model", {name: "2GiB", "max_model_len": "4k", "dtype": "half"})
    assert config.executor.kv_cache_bytes == 2**31
    assert (config.executor.max_model_len, config.executor.dtype) == (4000, "float16")
    assert engine_config("model", {"max_model_len": "auto"}).executor.max_model_len is None


@pytest.mark.parametrize(("text", "expected"), table(__file__, "sizes"))
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "8Gi iB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size_bytes(text)


@pytest.mark.parametrize(("keywords", "message"), table(__file__, "keywords", np=np))
def test_a_keyword_that_cannot_be_used_is_refused_by_name(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config("model", keywords)


def test_flags_that_nothing_reads_without_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RouteError, match="needs --"):
        routed("--chat-template", "x")
    with pytest.raises(ConfigError, match="^model: 'a' and, as --model, 'b' given"):
        served("a", "--model", "b")
    for model in (None, str(tmp_path)):
        with pytest.raises(ModelError, match="^revision: 'main' given"):
            resolve_model(model, revision="main")
