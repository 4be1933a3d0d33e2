"""`penstock serve`: from the command line to a running server, saying on the way what takes time and memory."""

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

import msgspec

from penstock.engine.commands.engine_options import add_engine_options, engine_options, json_object, size_bytes
from penstock.engine.config import ConfigError, EngineConfig, engine_config
from penstock.engine.front.client import AsyncEngine
from penstock.engine.model_files import DEFAULT_NAME, ModelFiles, recommended_sampling, resolve_model
from penstock.engine.server.server_config import (
    API_KEY_VARIABLE,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ServerConfig,
    resolve,
)
from penstock.engine.text.template import load_template
from penstock.engine.text.tokenizer import load_tokenizer
from penstock.executor.process_life import stop_signals
from penstock.executor.protocol import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ServerConfig()
    parser.add_argument("model", nargs="?", help=f"hub name, folder or .gguf file (default: {DEFAULT_NAME})")
    parser.add_argument("--model", dest="model_option", help=argparse.SUPPRESS)  # as it is given to vLLM's module
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=defaults.port, help="0 takes any free port (default: %(default)s)")
    add("--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeat for more than one")
    add("--served-model-name", nargs="+", metavar="NAME", help="what the API calls the model (default: its own name)")
    add("--chat-template", metavar="FILE", help="a Jinja chat template in place of the model's own")
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=defaults.tool_call_parser,
        help="the format in which the model writes tool calls (default: %(default)s, as its chat template does)",
    )
    add(
        "--constrain-auto-tools",
        action=argparse.BooleanOptionalAction,
        default=defaults.constrain_auto_tools,
        help="hold optional tool calls to their schema by a grammar (default: on)",
    )
    add(
        "--coerce-one-of",
        action=argparse.BooleanOptionalAction,
        default=defaults.coerce_one_of,
        help="take a oneOf whose schemas may hold for the same value for anyOf, in place of refusing it (default: off)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=defaults.reasoning_parser,
        help="the marks around the model's reasoning (default: %(default)s, as in its chat template)",
    )
    add("--revision", metavar="REV", help="of a model from the hub: a branch, tag or commit")
    add(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="where a request says nothing, sample as the model's authors recommend, or as OpenAI does (vllm)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help='over that, like {"temperature": 0.5}',
    )
    add(
        "--allowed-origins",
        action="extend",
        type=_origins,
        default=[],
        metavar="ORIGIN",
        help="web pages from there may ask (CORS), like https://app.example, or * for all; repeat, or give a JSON list "
        "(default: none)",
    )
    add("--pooling", choices=("last", "mean"), default=defaults.pooling, help="of embeddings (default: %(default)s)")
    add("--max-logprobs", type=int, default=defaults.max_logprobs, metavar="N", help="limit (default: %(default)s)")
    add("--max-body-bytes", type=size_bytes, default=defaults.max_body_bytes, metavar="SIZE", help="limit of a body")
    add("--max-connections", type=int, default=defaults.max_connections, metavar="N", help="default: %(default)s")
    add(
        "--drain-timeout",
        type=float,
        default=defaults.drain_timeout_s,
        metavar="S",
        help="how long a stop waits for running requests (default: %(default)g)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr)
    options = engine_options(args)
    if args.model and args.model_option:
        raise ConfigError(f"model: {args.model!r} and, as --model, {args.model_option!r} given; one is expected")
    need_weights = options.get("load_format") != "dummy"
    files = resolve_model(args.model or args.model_option, revision=args.revision, need_weights=need_weights)
    engine = engine_config(str(files.path), options)
    recommended = recommended_sampling(files) if args.generation_config == "auto" else {}
    server = _server_config(args, files.name, recommended | (args.override_generation_config or {}))
    import uvloop

    return uvloop.run(_serve(files, engine, server, args))


def check(args: argparse.Namespace) -> None:
    """Refuse what can be refused without the model's files."""
    name = args.model or args.model_option or DEFAULT_NAME
    engine_config(name, engine_options(args))
    _server_config(args, name, args.override_generation_config or {})


def _server_config(args: argparse.Namespace, name: str, default_sampling: dict[str, Any]) -> ServerConfig:
    config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key),
        served_model_names=tuple(args.served_model_name or (name,)),
        default_sampling=default_sampling,
        seed=args.seed,
        allowed_origins=tuple(args.allowed_origins),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        constrain_auto_tools=args.constrain_auto_tools,
        coerce_one_of=args.coerce_one_of,
        pooling=args.pooling,
        max_logprobs=args.max_logprobs,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        drain_timeout_s=args.drain_timeout,
    )
    try:
        return resolve(config, os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _origins(text: str) -> list[str]:
    """One origin, or a JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"not a JSON list of texts: {error}") from None


async def _serve(files: ModelFiles, config: EngineConfig, server: ServerConfig, args: argparse.Namespace) -> int:
    # starlette and uvicorn take a while to import: after the core process has begun to load.
    started_s = time.monotonic()
    from penstock.engine.http.listen import bind_socket

    try:
        sock = bind_socket(server.host, server.port)  # a port in use shows before the model is loaded
    except OSError as error:
        raise ConfigError(f"port: {error.strerror or error}") from None
    tokenizer, template = load_tokenizer(files), load_template(files, args.chat_template)
    task = asyncio.current_task()
    assert task is not None
    engine = AsyncEngine(
        config,
        eos_ids=tokenizer.eos_ids,
        text_stream=tokenizer.stream,
        max_logprobs=server.max_logprobs,
        progress=_say,
    )
    with stop_signals(task.cancel):  # until the server takes over, which drains
        try:
            _say(f"Starting {files.name}")
            await engine.start()
            _say_memory(engine.info)
            if engine.info.device == "cpu" and args.gpu_memory_utilization is not None:
                _say("--gpu-memory-utilization: without effect: the model runs on the CPU; use --kv-cache-bytes")
            from penstock.engine.server.lifetime import serve

            def announce(url: str) -> None:
                _say(f"Ready after {time.monotonic() - started_s:.1f} s: {url}")
                _say_curl(url, server, has_template=template is not None)

            return await serve(engine, tokenizer, template, server, sock=sock, on_listening=announce)
        except asyncio.CancelledError:
            _say("Stopped before the model was loaded")
            return 0
        finally:
            await engine.close()
            sock.close()


def _say(line: str) -> None:
    print(line, flush=True)


def _say_memory(info: ModelInfo) -> None:
    _say(f"{info.architecture} in {info.dtype} on {info.device}")
    width = max(12, *map(len, info.memory))
    for name, num_bytes in info.memory.items():
        _say(f"  {name:<{width}} {num_bytes / 2**20:10,.0f} MiB")
    tokens = (info.num_blocks - 1) * info.block_size
    _say(
        f"  the cache holds {tokens:,} tokens in blocks of {info.block_size}; a request may have {info.max_model_len:,}"
    )


def _say_curl(url: str, server: ServerConfig, has_template: bool) -> None:
    """Short enough for a small model on a CPU, and streamed, so that it is seen to work."""
    body: dict[str, Any] = {"model": server.served_model_names[0], "max_tokens": 60, "stream": True}
    if has_template:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Explain gravity in one sentence."}]
    else:
        path = "completions"
        body["prompt"] = "The capital of France is"
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if server.api_keys else ""
    _say(f"Try:\n  curl -N {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
    if server.api_keys:
        _say(f"  with the key in {API_KEY_VARIABLE}")
