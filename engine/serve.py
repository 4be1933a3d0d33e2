"""`penstock serve`: from the command line to a running server, saying on the way what takes time and memory."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from penstock.engine.client import AsyncEngine
from penstock.engine.config import ConfigError, EngineConfig, engine_config
from penstock.engine.model_files import DEFAULT_NAME, ModelFiles, recommended_sampling, resolve_model
from penstock.engine.options import add_engine_options, engine_options, size_bytes
from penstock.engine.server.config import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ServerConfig,
    resolve,
)
from penstock.engine.text.template import load_template
from penstock.engine.text.tokenizer import load_tokenizer
from penstock.executor.protocol import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ServerConfig()
    parser.add_argument("model", nargs="?", help=f"hub name, folder or .gguf file (default: {DEFAULT_NAME})")
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
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=defaults.reasoning_parser,
        help="the marks around the model's reasoning (default: %(default)s, as in its chat template)",
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
    files = resolve_model(args.model, need_weights=options.get("load_format") != "dummy")
    engine = engine_config(str(files.path), options)
    server = _server_config(args, files.name, recommended_sampling(files))
    import uvloop

    return uvloop.run(_serve(files, engine, server, args.chat_template))


def check(args: argparse.Namespace) -> None:
    """Refuse what can be refused without the model's files."""
    engine_config(args.model or DEFAULT_NAME, engine_options(args))
    _server_config(args, args.model or DEFAULT_NAME, {})


def _server_config(args: argparse.Namespace, name: str, default_sampling: dict[str, Any]) -> ServerConfig:
    config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key),
        served_model_names=tuple(args.served_model_name or (name,)),
        default_sampling=default_sampling,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        constrain_auto_tools=args.constrain_auto_tools,
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


async def _serve(files: ModelFiles, config: EngineConfig, server: ServerConfig, chat_template: str | None) -> int:
    # starlette and uvicorn take a while to import: after the core process has been told to load.
    started_s = time.monotonic()
    from penstock.engine.http.listen import bind_socket

    try:
        sock = bind_socket(server.host, server.port)  # a port in use shows before the model is loaded
    except OSError as error:
        raise ConfigError(f"port: {error.strerror or error}") from None
    tokenizer, template = load_tokenizer(files), load_template(files, chat_template)
    _say(f"Starting {files.name}")
    engine = AsyncEngine(
        config,
        eos_ids=tokenizer.eos_ids,
        text_stream=tokenizer.stream,
        max_logprobs=server.max_logprobs,
        progress=_say,
    )
    _cancel_on_signals()  # until the server takes over, which drains
    try:
        await engine.start()
        _say_memory(engine.info)
        from penstock.engine.server.serve import serve

        def announce(url: str) -> None:
            _say(f"Ready after {time.monotonic() - started_s:.1f} s: {url}")
            _say_curl(url, server)

        return await serve(engine, tokenizer, template, server, sock=sock, on_listening=announce)
    except asyncio.CancelledError:
        _say("Stopped before the model was loaded")
        return 0
    finally:
        await engine.close()
        sock.close()


def _cancel_on_signals() -> None:
    """A stop while the model loads must still end the core process and remove its sockets."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)


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


def _say_curl(url: str, server: ServerConfig) -> None:
    message = {"role": "user", "content": "Say hello in French."}
    # Small models ramble at OpenAI's default temperature of 1.
    body = json.dumps({"model": server.served_model_names[0], "temperature": 0.2, "messages": [message]})
    key = " -H 'Authorization: Bearer '$KEY" if server.api_keys else ""
    _say(f"Try:\n  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
