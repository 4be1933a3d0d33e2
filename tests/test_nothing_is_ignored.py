"""No option and no keyword is ignored in silence: each is used, or documented as accepted without effect, or refused.

Flags that end in a configuration have to change it; of what else can be said, some code has to read the value.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.cli import _COMMANDS
from penstock.engine.commands import serve
from penstock.engine.config import ConfigError, SchedulerConfig
from penstock.engine.engine_options import EngineOptions, engine_config
from penstock.engine.front.submit import begin_answer
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import resolve_model
from penstock.engine.options import given_options
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.server import requests as schema
from penstock.engine.server.other_fields import OTHER_FIELDS
from penstock.engine.text.prompt import RENDERING
from penstock.executor.protocol import ExecutorConfig, ModelInfo
from penstock.router import serve as route
from penstock.router.backend import RouteError
from tests.support.fork_server import ROOT
from tests.support.refusals import table

_FLAGS = json.loads(Path(__file__).with_suffix(".json").read_text())
# Values for flags whose kind does not say one, and what a flag needs beside it.
SAID: dict[str, str] = _FLAGS["SAID"]
COMPANY: dict[str, list[str]] = _FLAGS["COMPANY"]
PARAMS: dict[str, Any] = _FLAGS["PARAMS"] | {"logit_bias": {7: 1.0}}  # JSON's keys are no numbers
OFF = {"enforce_eager", "batch_invariant", "enable_expert_parallel", "enable_eplb", "enable_lora"}  # by default
# Of `penstock serve`: what finds the model's files and what of them is used, before there is a configuration.
OF_FILES = {"model", "model_option", "revision", "chat_template", "generation_config"}


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those with an effect of their own; of those that vLLM has, tests/test_cli.py says that they are answered."""
    for action in parser._actions:
        if action.dest != "help" and action.default is not argparse.SUPPRESS:
            yield action


def words(action: argparse.Action) -> list[str]:
    flag = action.option_strings[-1]
    if action.nargs == 0:
        # The only one, or that which turns it off, or on where it is off.
        is_off = action.default is False or action.dest in OFF
        return [action.option_strings[0] if is_off else flag]
    if action.choices:
        return [flag, next(str(choice) for choice in action.choices if choice not in (action.default, "auto"))]
    numbers: dict[Any, str] = {int: "77", float: "0.77"}
    return [flag, SAID.get(action.dest) or numbers.get(action.type, "1500")]


def parsed(command: Any, given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(given)


def actions_of(command: Any) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return list(options(parser))


def served(given: list[str]) -> tuple[Any, Any]:
    args = parsed(serve, given)
    return (
        engine_config("model", given_options(args, EngineOptions)),
        serve.server_config(args, "model", {}),
    )


@pytest.mark.parametrize("action", actions_of(serve), ids=lambda action: action.dest)
def test_every_flag_of_serve_changes_what_is_served(
    action: argparse.Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action.dest in OF_FILES:
        assert f"args.{action.dest}" in source("engine/commands/serve.py").split("def run")[1]
        return
    monkeypatch.setitem(SAID, "kv_peer_secret_file", str(tmp_path / "secret"))
    (tmp_path / "secret").write_text("a secret that is long enough to be one\n")
    (tmp_path / "secret").chmod(0o600)
    company = COMPANY.get(action.dest, [])
    if action.dest in ("kv_disk_path", "kv_disk_bytes"):  # neither goes without the other
        other = [*company[:1], "2GiB" if company[1] == "1GiB" else "/elsewhere"]
        assert served([*company, *words(action)]) != served([*other, *words(action)])
        return
    assert served([*company, *words(action)]) != served(company)


@pytest.mark.parametrize("action", actions_of(route), ids=lambda action: action.dest)
def test_every_flag_of_route_changes_what_is_routed(
    action: argparse.Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = COMPANY.get(action.dest, [])
    changed = route.check(parsed(route, [*company, *words(action)]))
    assert changed != route.check(parsed(route, company))


READERS = {
    "bench": ["engine/commands/bench/*.py"],
    "cache": ["cache/tiers/disk/operate.py"],
    "models": ["engine/commands/models.py"],
    "prove": ["prove/*.py"],
}


@pytest.mark.parametrize("name", READERS)
def test_every_flag_of_the_other_commands_is_read(name: str) -> None:
    text = "".join(path.read_text() for pattern in READERS[name] for path in sorted(ROOT.glob(pattern)))
    read = set(re.findall(r"\b(?=(?:args|options|self)\.(\w+))", text)) | {
        *ExecutorConfig.__struct_fields__,
        *SchedulerConfig.__struct_fields__,
    }
    parser = argparse.ArgumentParser()
    _COMMANDS[name].load().add_arguments(parser)
    parsers = [parser]
    for each in parsers:
        for action in options(each):
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest not in (*read, "executor"):
                pytest.fail(f"no code reads {action.option_strings or action.dest}")


def test_every_command_is_walked() -> None:
    assert {*_COMMANDS} == {*READERS, "serve", "route"}


# Those that the text alone knows, and that of the grammar, which is made before.
OF_TEXT = {"stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "structured_outputs"}


def test_every_sampling_parameter_reaches_the_core_or_the_text() -> None:
    info = msgspec.convert(
        {"architecture": "", "dtype": "", "device": "", "vocab_size": 50, "hidden_size": 8, "max_model_len": 64}
        | {"block_size": 4, "num_blocks": 9, "block_bytes": 8, "fingerprint": b"", "max_in_flight": 1},
        ModelInfo,
        strict=False,
    )

    def sent(**given: Any) -> Any:
        params = SamplingParams(**{"seed": 1, **given})
        answer = begin_answer("r", b"\1\0\0\0", params, info, None, Mock(), sampling=params.sampling([3]))
        return msgspec.to_builtins(answer.messages)

    for name, value in PARAMS.items():
        assert sent(**{name: value}) != sent(), name
    assert {*PARAMS} | OF_TEXT == {*SamplingParams.__struct_fields__}
    assert attributes("engine") >= OF_TEXT - {"stop"} | {"stop_strings"}


REQUESTS = [
    schema.CompletionRequest,
    schema.ChatRequest,
    schema.EmbeddingRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
]


@pytest.mark.parametrize("request_type", REQUESTS)
def test_every_field_of_a_request_is_read(request_type: type[msgspec.Struct]) -> None:
    loops = {"logprobs", *StructuredOutputs.__struct_fields__}
    named = [*RENDERING, "tools"]
    read = attributes("engine/server") | {*schema.SAMPLING_FIELDS, *loops, *named}
    assert {*request_type.__struct_fields__} <= read


def test_what_is_accepted_without_effect_is_documented() -> None:
    (listed,) = re.findall(r"\*\*Accepted without effect\*\*(.*?)\*\*Refused by name\*\*", source("docs/api.md"), re.S)
    documented = set(re.findall(r"`([\w.]+)`", listed))
    assert OTHER_FIELDS.harmless - {"parallel_tool_calls"} <= documented
    read = attributes("engine/server") | {
        *schema.SAMPLING_FIELDS,
        *RENDERING,
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "arguments",
        "include_stop_str_in_output",
    }
    for found in vars(schema).values():
        if isinstance(found, type) and issubclass(found, msgspec.Struct) and found.__module__ == schema.__name__:
            unread = {*found.__struct_fields__} - read
            assert unread <= {name.rpartition(".")[2] for name in documented} | {*PROMPT_PARTS}, found.__name__


# Read by their names, in a loop: written into the prompt or refused.
PROMPT_PARTS = ("description", "function_call", "audio")


@pytest.mark.parametrize(("given", "named"), table(__file__, "options without another"))
def test_an_option_that_nothing_reads_without_another_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: given; "):
        engine_config("model", given)


def test_flags_that_nothing_reads_without_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RouteError, match="needs --"):
        route.check(parsed(route, ["--chat-template", "x"]))
    with pytest.raises(ConfigError, match="^model: 'a' and, as --model, 'b' given"):
        serve.run(parsed(serve, ["a", "--model", "b"]))
    for model in (None, str(tmp_path)):
        with pytest.raises(ModelError, match="^revision: 'main' given"):
            resolve_model(model, revision="main")


def source(path: str) -> str:
    return (ROOT / path).read_text()


def attributes(folder: str) -> set[str]:
    """Every name that is read as an attribute there."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
