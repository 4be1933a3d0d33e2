"""The command `penstock serve`: starts a server, and prints the time and memory that the start takes."""

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.engine_options import EngineOptions, engine_config
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.engine import EngineDead
from penstock.engine.http.sockets import PortError, bind_sockets
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import DEFAULT_NAME, ModelFiles, recommended_sampling, resolve_model
from penstock.engine.options import add_options, built, given_options
from penstock.engine.server.server_config import API_KEY_VARIABLE, ServerConfig, resolve
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.template import load_template
from penstock.engine.vllm_options import add_ignored_options
from penstock.executor.logs import log_to_stderr
from penstock.executor.process_life import stop_signals
from penstock.executor.protocol import ContextLimit, ExecutorError, ModelInfo

USER_ERRORS = (ConfigError, EngineDead, ExecutorError, ModelError, PortError)
COMMON_FLAGS = (
    "--host", "--port", "--api-key", "--served-model-name", "--chat-template", "--log-level",
    "--dtype", "--device", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--speculative-config",
    "--kv-cache-bytes", "--kv-cache-dtype", "--kv-host-bytes", "--kv-disk-path", "--kv-disk-bytes",
    "--gpu-memory-utilization", "--tensor-parallel-size", "--enable-lora",
)  # fmt: skip
EXAMPLES = """\
  penstock serve                                              the default model, on this machine alone
  penstock serve Qwen/Qwen3-0.6B --max-model-len 8192         a model of the hub
  penstock serve ./model.gguf --host 0.0.0.0 --api-key KEY    open to other machines
  penstock serve MODEL --kv-host-bytes 16g --kv-disk-path DIR --kv-disk-bytes 200g
"""
# How the limit of a request's length is determined, for the lines that the start prints.
CONTEXT_LIMITS: dict[ContextLimit, str] = {
    "model": "the model's own length",
    "max_model_len": "max_model_len",
    "kv_cache": "as many as the cache holds",
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options that select the files of a model and the sampling defaults."""

    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    dry_run: bool = False
    revision: str | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    override_generation_config: dict[str, Any] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"hub name, folder or .gguf file (default: {DEFAULT_NAME})")
    # For command lines of vLLM's Python module.
    parser.add_argument("--model", dest="model_option", help=argparse.SUPPRESS)
    for kind in (ServerConfig, ModelOptions, EngineOptions):
        add_options(parser, kind)
    add_ignored_options(parser)


def run(args: argparse.Namespace) -> int:
    options = given_options(args, EngineOptions)
    if args.model and args.model_option:
        raise ConfigError(f"model: {args.model!r} and, as --model, {args.model_option!r} given; one is expected")
    model = args.model or args.model_option
    for name in args.served_model_names[1:] if model is None else ():
        if "/" in name or name.endswith(".gguf") or Path(name).exists():
            raise ConfigError(f"served_model_names: {name!r} given, and no model; name the model first, or as --model")
    need_weights = options.get("load_format") != "dummy"
    # The options are checked before the model is downloaded; only its name is not known yet.
    check_adapters(engine_config("", options), server_config(args, model or DEFAULT_NAME, {}))
    log_to_stderr(args.log_level)
    files = resolve_model(model, revision=args.revision, need_weights=need_weights)
    engine = engine_config(str(files.path), options)
    server = server_config(args, files.name, {})  # refuses an adapter of the model's name
    if args.dry_run:
        _say_memory(import_module("penstock.executors").preview(engine.executor))
        return 0
    import uvloop

    return uvloop.run(_serve(files, engine, server, args))


def check_adapters(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if the server has an option about adapters and the engine does not accept them."""
    for name in ("lora_modules", "allow_lora_updates"):
        if getattr(server, name) and not engine.executor.enable_lora:
            raise ConfigError(f"{name}: given; it requires enable_lora")


def server_config(args: argparse.Namespace, name: str, recommended: dict[str, Any]) -> ServerConfig:
    """Build the server's configuration; `recommended` are the sampling defaults of the model's authors."""
    config = built(
        args,
        ServerConfig,
        served_model_names=tuple(args.served_model_names or (name,)),
        default_sampling=recommended | (args.override_generation_config or {}),
    )
    try:
        return resolve(config, os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None


async def _serve(files: ModelFiles, config: EngineConfig, server: ServerConfig, args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    sockets = bind_sockets(server.host, server.port)  # reports a port that is in use before the model is loaded
    task = asyncio.current_task()
    assert task is not None
    engine = AsyncEngine(config, progress=_say)
    with stop_signals(task.cancel):  # until the server itself handles signals, by draining
        try:
            drafts = config.scheduler.speculative_config
            size = "" if drafts is None else f" with up to {drafts.most_drafts} draft tokens per request and step"
            _say(f"Starting {files.name}{size}")
            engine.spawn()  # the core loads the model while a thread reads the tokenizer, so that signals are handled
            engine.tokenizer = tokenizer = await asyncio.to_thread(load_tokenizer, files)
            if args.generation_config == "auto":
                recommended = await asyncio.to_thread(recommended_sampling, files)
                server = server_config(args, files.name, recommended)
            variables = args.default_chat_template_kwargs
            template = await asyncio.to_thread(load_template, tokenizer, args.chat_template, variables)
            # Import the HTTP server, which takes long, while the model is loaded.
            lifetime = await asyncio.to_thread(import_module, "penstock.engine.server.lifetime")
            await engine.start()
            _say_memory(engine.info)
            _say_sampling(server.default_sampling)
            if engine.info.device == "cpu" and args.gpu_memory_utilization is not None:
                _say("--gpu-memory-utilization: without effect: the model runs on the CPU; use --kv-cache-bytes")

            def announce(url: str) -> None:
                _say(f"Ready after {time.monotonic() - started_s:.1f} s: {url}")
                _say_curl(url, server, template is not None)

            service = lifetime.Service(engine, tokenizer, template, server)
            return int(await lifetime.serve(service, sockets, announce))
        except asyncio.CancelledError:
            _say("Stopped before the model was loaded")
            return 0
        finally:
            await engine.close()
            for sock in sockets:
                sock.close()


def _say(line: str) -> None:
    """Print a line; a closed pipe or a full disk must not end the server."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say_memory(info: ModelInfo) -> None:
    _say(f"{info.architecture} on {info.device}")
    rows = {name: num_bytes for name, num_bytes in info.memory.items() if name == "KV cache" or num_bytes >= 2**19}
    names = {"weights as codes": f"weights ({', '.join(info.storage)})"}
    width = max(12, *(len(names.get(name, name)) for name in rows))
    for name, num_bytes in rows.items():
        computed = f", computed in {info.dtype}" if name in ("weights", "weights as codes") else ""
        _say(f"  {names.get(name, name):<{width}} {num_bytes / 2**20:10,.0f} MiB{computed}")
    _say(f"  the cache has {info.num_blocks - 1:,} blocks of {info.block_size} tokens")
    typical, step = min(2000, info.max_model_len), info.max_num_batched_tokens
    pages = sum(group.most_pages(typical, step, info.block_size) for group in info.groups)
    size = f"{pages * info.block_bytes / 2**20:,.1f} MiB"
    _say(f"  a request of {typical:,} tokens takes {size} of it; {(info.num_blocks - 1) // pages:,} fit")
    limit = CONTEXT_LIMITS[info.context_limit]
    _say(f"  a request may have {info.max_model_len:,} tokens with its answer: {limit}")


def _say_sampling(defaults: dict[str, Any]) -> None:
    """Print the sampling parameters of a request that gives none."""
    shown = {"temperature": 1.0, "top_p": 1.0, **defaults}
    values = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    _say(f"  requests that give no sampling parameters are sampled with {values}")


def _say_curl(url: str, server: ServerConfig, has_template: bool) -> None:
    """Print a curl command for a first request: short enough for a small model on a CPU, and streamed."""
    body: dict[str, Any] = {"model": server.served_model_names[0], "max_tokens": 60, "stream": True}
    if has_template:
        path = "v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Explain gravity in one sentence."}]
    else:
        path = "v1/completions"
        body["prompt"] = "The capital of France is"
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if server.api_keys else ""
    _say(f"Try:\n  curl -N {url}/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
    if server.api_keys:
        _say(f"  with the key in {API_KEY_VARIABLE}")
