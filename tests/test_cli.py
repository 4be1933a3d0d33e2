"""The command line: what a user sees of help, versions and mistakes. No torch is loaded for any of it."""

import argparse
import subprocess
import sys

import pytest

from penstock import __version__, cli
from penstock.cli import main
from penstock.engine.options import add_engine_options, engine_options, size_bytes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_version_and_the_commands_are_shown():
    assert run("--version").stdout.strip() == f"penstock {__version__}"
    shown = run("--help").stdout
    assert all(command in shown for command in ("serve", "deploy", "bench", "export"))


def test_an_interrupt_while_a_command_is_still_imported_ends_without_a_word(monkeypatch, capsys):
    def load():
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "serve", ("", load))
    assert main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["serve", "deploy", "bench", "export"])
def test_every_command_has_help(command: str):
    result = run(command, "--help")
    assert result.returncode == 0 and f"usage: penstock {command}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "/nowhere"], "there is no folder or .gguf file '/nowhere'"),
        (["serve", "--port", "70000"], "port: 70000 is out of range"),
        (["serve", "--drain-timeout", "-1"], "drain_timeout_s: -1.0 is out of range"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs: 0 given"),
        (["serve", "--gpu-memory-utilization", "nan"], "gpu_memory_utilization: nan given"),
        (["serve", "--api-key", ""], "api_keys: a key must be printable"),
        (["route", "--backend", "http://127.0.0.1:1", "--api-key", ""], "api_keys: a key must be printable"),
        (["export", "/nowhere", "-o", "/nowhere/else"], "there is no folder or .gguf file '/nowhere'"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("penstock: ") and shown.count("\n") == 1


def test_an_unknown_command_lists_the_known_ones():
    result = run("frob")
    assert result.returncode == 2 and "'serve', 'route', 'deploy', 'top', 'bench', 'cache', 'export'" in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("512", 512), ("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("2 KiB", 2048)],
)
def test_sizes_are_read_with_their_units(text: str, expected: int):
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "8Gi iB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        size_bytes(text)


def test_only_options_that_were_given_reach_the_engine():
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    assert engine_options(parser.parse_args([])) == {}
    given = parser.parse_args(["--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1GiB", "--hf-overrides", "{}"])
    assert engine_options(given) == {"enable_prefix_caching": False, "kv_cache_bytes": 2**30, "hf_overrides": {}}
