"""The command line: what a user sees of help, versions and mistakes. No torch is loaded for any of it."""

import argparse
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from penstock import __version__, cli
from penstock.cli import main
from penstock.engine.commands import serve
from penstock.engine.config import ConfigError, SchedulerConfig
from penstock.engine.engine_options import EngineOptions, add_engine_options, engine_config, option_names
from penstock.engine.options import given_options, options_of, size_bytes
from penstock.engine.vllm_options import IGNORED, WITH_VALUE
from penstock.executor.protocol import ExecutorConfig
from tests.support.refusals import table


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process."""

    def run(*words: str) -> Ended:
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


def test_the_version_and_the_commands_are_shown(run: Run) -> None:
    version = subprocess.run([sys.executable, "-m", "penstock.cli", "--version"], capture_output=True, text=True)
    assert version.stdout.strip() == f"penstock {__version__}"
    for shown in (run("--help").out, run().err + run().out):
        assert "commands:" in shown and all(command in shown for command in ("serve", "route", "bench", "prove"))
    assert run().code == 2
    unknown = run("frob")
    assert unknown.err == "penstock: frob: there is no such command; commands are " + ", ".join(cli._COMMANDS) + "\n"
    assert run("serv").err == "penstock: serv: there is no such command; did you mean serve?\n"
    assert unknown.code == run("serv").code == 2


def test_an_interrupt_while_a_command_is_still_imported_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.Command, "load", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "penstock_prove", Mock(USER_ERRORS=(), run=Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(sys, "argv", ["penstock-prove"])
    assert main(["serve"]) == runpy.run_path("deploy/prove/__main__.py")["main"]() == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["serve", "route", "bench", "prove"])
def test_every_command_has_help(command: str, run: Run) -> None:
    ended = run(command, "--help")
    assert ended.code == 0 and f"usage: penstock {command}" in ended.out


def test_the_help_of_serve_shows_common_options_and_all_if_it_is_asked_for_them(run: Run) -> None:
    common, every = run("serve", "--help").out, run("serve", "--help=all").out
    shown = [{*re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)} for text in (common, every)]
    assert len(shown[0]) == len(serve.COMMON_FLAGS) and {*serve.COMMON_FLAGS} == shown[0] < shown[1]
    assert "--help=all" in common and "--kv-peer" in every and "--kv-peer" not in common


@pytest.mark.parametrize(("arguments", "message"), table(__file__, "mistakes"))
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], message: str, run: Run) -> None:
    code, _, shown = run(*arguments)
    assert code == 2 and message in shown and shown.startswith("penstock: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"), [*table(__file__, "unknown options"), *table(__file__, "unreadable values")]
)
def test_an_unknown_option_and_an_unreadable_value_are_one_line_of_the_command(
    arguments: list[str], message: str, run: Run
) -> None:
    code, _, shown = run(*arguments)
    assert code == 2 and message in shown
    assert shown.startswith(f"penstock {arguments[0]}") and shown.count("\n") == 1


def test_options_of_vllm_that_change_nothing_here_are_taken_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    flags = ["--enable-auto-tool-choice", "--trust-remote-code", "--disable-log-stats", "--seed", "3"]
    args = parser.parse_args([*flags, "--dtype", "half", "--max-model-len", "2k", "--kv-cache-memory-bytes", "1GiB"])
    given = {"seed": 3, "dtype": "float16", "max_model_len": 2000, "kv_cache_bytes": 2**30}
    assert given_options(args, EngineOptions) == given
    shown = capsys.readouterr().err
    assert shown.count("without effect") == 3 and "--trust-remote-code: without effect: code of" in shown


def test_names_of_vllms_that_mean_options_of_ours_set_them() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = ["--distributed-executor-backend", "mp", "--max-num-queued-reqs", "7", "--kv-cache-memory-bytes", "1GiB"]
    flags += ["--shutdown-timeout", "5", "--uvicorn-log-level", "warning", "-ep", "--no-enable-eplb", "-tp", "2"]
    args = parser.parse_args([*flags, "--no-enforce-eager", "--device-memory-utilization", "0.5", "--no-enable-lora"])
    given = {"executor": "multiproc", "max_queued_requests": 7, "enable_expert_parallel": True, "enable_eplb": False}
    given |= {"enable_lora": False, "kv_cache_bytes": 2**30, "tensor_parallel_size": 2}
    assert given_options(args, EngineOptions) == given | {"enforce_eager": False, "gpu_memory_utilization": 0.5}
    assert (args.drain_timeout_s, args.log_level) == (5.0, "warning")
    assert engine_config("model", {"distributed_executor_backend": "mp"}).executor.kind == "multiproc"


def test_every_ignored_option_is_said_once_on_the_command_line_and_in_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    for name in IGNORED:
        flag = "--" + name.replace("_", "-")
        parser.parse_args([flag, "some-value"] if name in WITH_VALUE else [flag])
        shown = capsys.readouterr().err
        assert shown.startswith(f"penstock: {flag}: without effect: ") and shown.count("\n") == 1
        with pytest.warns(UserWarning, match=f"{name}: without effect") as warned:
            engine_config("model", {name: True})
        assert len(warned) == 1
    assert not {*IGNORED} & option_names()


@pytest.mark.parametrize(("text", "expected"), table(__file__, "sizes"))
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "8Gi iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size_bytes(text)


def test_only_options_that_were_given_reach_the_engine() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    assert given_options(parser.parse_args([]), EngineOptions) == {}
    args = parser.parse_args(["--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1GiB", "--hf-overrides", "{}"])
    assert given_options(args, EngineOptions) == {
        "enable_prefix_caching": False,
        "kv_cache_bytes": 2**30,
        "hf_overrides": {},
    }


def test_all_that_an_engine_can_be_configured_with_is_an_option_and_the_help_knows_its_default() -> None:
    executor, scheduler = ExecutorConfig(), SchedulerConfig()
    fields = {*executor.__struct_fields__, *scheduler.__struct_fields__} - {"model", "kind"}
    assert {*EngineOptions.__dataclass_fields__} - {"executor"} == fields
    said = {
        option.name: re.search(r"default: (\d[\d.]*)\)", option.flag.help or "") for option in options_of(EngineOptions)
    }
    named = {name: float(found[1]) for name, found in said.items() if found is not None}
    assert len(named) >= 5
    assert named == {name: getattr(scheduler, name, getattr(executor, name, None)) for name in named}


@pytest.mark.parametrize("name", ["kv_cache_bytes", "kv_cache_memory_bytes"])
def test_a_keyword_may_be_written_as_its_flag_is(name: str) -> None:
    config = engine_config("model", {name: "2GiB", "max_model_len": "4k", "dtype": "half"})
    assert config.executor.kv_cache_bytes == 2**31
    assert (config.executor.max_model_len, config.executor.dtype) == (4000, "float16")
    assert engine_config("model", {"max_model_len": "auto"}).executor.max_model_len is None


def test_an_option_given_under_both_of_its_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="^kv_cache_memory_bytes: given beside kv_cache_bytes"):
        engine_config("model", {"kv_cache_memory_bytes": 2**30, "kv_cache_bytes": 2**31})
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-cache-bytes", "1GiB", "--kv-cache-memory-bytes", "2GiB"])
    assert "--kv-cache-memory-bytes: not allowed with argument --kv-cache-bytes" in capsys.readouterr().err


def test_an_objection_names_the_place_within_an_option_and_the_value_there() -> None:
    with pytest.raises(ConfigError, match=r"^kv_peers\[1\]: 7 given; expected `str`"):
        engine_config("model", {"kv_peers": ("127.0.0.1:1", 7)})
    with pytest.raises(ConfigError, match=r"^speculative_config: 3 given; expected `object \| null`, got `int`"):
        engine_config("model", {"speculative_config": 3})


def test_a_reader_that_leaves_costs_no_traceback() -> None:
    for reader in ("head -1", "true"):
        command = f"{sys.executable} -m penstock.cli models | {reader}"
        ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert ended.stdout.startswith("| family") == (reader != "true") and not ended.stderr
    code = "from penstock.engine.commands.serve import _say; _say('a'); _say('b'); import sys; sys.exit('alive')"
    ended = subprocess.run(
        ["sh", "-c", f'{{ {sys.executable} -c "sleep=1; {code}"; }} | true'], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == "alive\n"


def test_what_is_opened_lands_on_no_standard_stream_that_was_closed() -> None:
    program = (
        "import os; from penstock import cli; "
        "cli._run = lambda _: 10 * all(map(os.get_inheritable, range(3))) + os.open('/dev/null', 0); "
        "os._exit(cli.main([]))"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program], timeout=60)
    assert done.returncode == 13
