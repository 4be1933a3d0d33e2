"""`penstock route`: parses the command line, runs the router and shuts it down.

The first SIGTERM drains: `/ready` and new requests answer 503, those in flight finish. The second ends it at once.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.engine.http.limits import MAX_REFUSALS, allow_open_files
from penstock.engine.http.sockets import BACKLOG, PortError, bind_sockets, listen, url_of
from penstock.engine.options import add_options, built
from penstock.engine.text.model_text import is_on_this_machine, load_text
from penstock.executor.logs import log_to_stderr
from penstock.executor.process_life import Stopping, stop_signals, wait_for
from penstock.router.app import RouterApp
from penstock.router.backend import Backend, RouteError
from penstock.router.config import RouterConfig, check_together, resolve
from penstock.router.discovery import Discovery
from penstock.router.exchange import NO_TRACE, BeginTrace, Exchange, move_requests
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.kv_feed import KvFeeds
from penstock.router.fleet.probe import Probe, ServedModel
from penstock.router.fleet.replica import Replica
from penstock.router.http.edge import ClientConnection
from penstock.router.placement.prompts import PromptReader
from penstock.router.tokenizer_check import tokenizes_alike

log = logging.getLogger("penstock.router")

USER_ERRORS = (PortError, RouteError)
SPARE_FILES = 16  # descriptors of the process itself
FILES_PER_REPLICA = 4  # its event stream, its probes, and one idle connection or two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    """Run the router; return the exit code. Raises RouteError for a mistake of the user, which is shown as one line."""
    config = check(args)
    log_to_stderr(args.log_level)
    _check_backends(config)
    import uvloop

    sockets = bind_sockets(config.host, config.port)
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)  # closed also if the router does not start
        return uvloop.run(serve(config, sockets))


def _check_backends(config: RouterConfig) -> None:
    if config.discover or any(Backend.of(text).prefill is None for text in config.backends):
        return
    if not config.admin_api_keys:
        raise RouteError(
            "backend: no replica that answers is given, and without --admin-api-key none can be added; name each as "
            "--backend http://HOST:PORT"
        )
    log.warning('no replica is there yet: add each with POST /replicas {"url": "http://HOST:PORT"} and the admin key')


def check(args: argparse.Namespace) -> RouterConfig:
    """Return the checked configuration; raise RouteError if it is invalid."""
    config = built(args, RouterConfig)
    check_together(config)
    return resolve(config, os.environ)


class RouterProcess:
    """The running router of one process, on one event loop."""

    def __init__(self, config: RouterConfig, prompts: PromptReader) -> None:
        self.config = config
        self.prompts = prompts
        exchanges: set[Exchange] = set()
        self.fleet = Fleet(config, partial(move_requests, exchanges))
        begin_trace, self._export_spans = spans_of(config)
        self.app = RouterApp(self.fleet, exchanges, prompts, self._watch, begin_trace)
        self.feeds = KvFeeds(self.fleet, self._can_follow)
        self.discovery = Discovery(config.discover, self.app.apply, self.fleet.tasks)
        self._servers: list[asyncio.Server] = []
        self._has_suggested = False  # a tokenizer

    async def start(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self.fleet.tasks.keep_running("the check of deadlines", self.app.edge.watch_deadlines)
        self.fleet.tasks.keep_running("the look at requests", self.app.watch_requests)
        for text in self.config.backends:
            self._watch(self.fleet.add(Backend.of(text)))
        self.discovery.start()
        await self._wait_for_probes()
        for sock in sockets:
            listen(sock)
            server = await loop.create_server(partial(ClientConnection, self.app.edge), sock=sock, backlog=BACKLOG)
            self._servers.append(server)

    async def _wait_for_probes(self) -> None:
        """Wait until every replica was probed once or the probe timeout has passed, so that a restarted router does not answer
        that no replica is available."""
        deadline_s = time.monotonic() + self.config.timeouts.probe_timeout_s
        while time.monotonic() < deadline_s and "starting" in {each.state for each in self.fleet.replicas.values()}:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.app.edge.shutdown()
        await asyncio.sleep(0)
        self.app.edge.close()
        await self.fleet.tasks.close()
        self.feeds.close()
        await asyncio.to_thread(self._export_spans)  # may wait for the collector
        for replica in (*self.fleet.replicas.values(), *self.fleet.detached):
            replica.pool.close()
        self.prompts.close()

    def _watch(self, replica: Replica) -> None:
        Probe(self.fleet, self._on_info, replica).start()

    def _on_info(self, replica: Replica, model: ServedModel) -> None:
        self.prompts.max_model_len = max(self.prompts.max_model_len, model.max_model_len or 0)
        if self.prompts.digest is not None and model.text_digest not in (None, self.prompts.digest):
            log.warning(
                "%s has another tokenizer or chat template than --tokenizer: it is sent text instead of token ids, and its "
                "cache contents are only estimated",
                replica.url,
            )
        self._suggest_tokenizer(replica.url, model.root or model.id)
        self.feeds.watch(replica)

    def _suggest_tokenizer(self, url: str, model: str) -> None:
        """Say once that --tokenizer could be given. The model is not read unasked, because a replica chooses its name."""
        if self.prompts.tokenizer is None and not self._has_suggested and is_on_this_machine(model):
            self._has_suggested = True
            words = f"--tokenizer {shlex.quote(model)}"
            log.info("%s serves a model that is on this machine: with %s its cache can be followed", url, words)

    async def _can_follow(self, replica: Replica) -> bool:
        """Return whether the router makes the engine's tokens, because its events name blocks by their tokens."""
        is_same: bool | None = False
        if self.prompts.tokenizer is not None:
            is_same = await tokenizes_alike(replica, self.prompts, self.config.timeouts.response_s)
        if is_same is False:
            log.warning(
                "%s tokenizes differently from --tokenizer, or no --tokenizer is given: its cache events are ignored, and "
                "its cache contents are only estimated",
                replica.url,
            )
        elif is_same is None:
            log.warning("%s has no /tokenize, so it is not checked whether it tokenizes like --tokenizer", replica.url)
        return is_same is not False


def prompt_reader_of(config: RouterConfig) -> PromptReader:
    if config.tokenizer is None:
        return PromptReader()
    try:
        text = load_text(config.tokenizer, config.chat_template, config.default_chat_template_kwargs)
    except ValueError as error:  # the model has no usable tokenizer
        raise RouteError(str(error)) from None
    prompts = PromptReader(*text)
    if prompts.segments is not None and not prompts.segments.is_exact:
        log.warning("this tokenizer cannot be cut at special tokens; every prompt is tokenized whole")
    return prompts


def spans_of(config: RouterConfig) -> tuple[BeginTrace, Callable[[], None]]:
    """Return a function that begins a request's spans, and one that exports the remaining spans at shutdown."""
    if config.telemetry.otlp_traces_endpoint is None:
        return lambda _request: NO_TRACE, lambda: None
    from penstock.router.spans import ExchangeSpans  # its SDK is an extra, and takes long to import

    spans = ExchangeSpans(config.telemetry, config.policy)
    return spans.begin, spans.close


def with_room_for_connections(config: RouterConfig) -> RouterConfig:
    """Raise the limit of open files for `--max-connections`, or lower `max_connections` to the hard limit.

    Each connection needs three descriptors: the client's, its replica's, and one for a client that is refused with an
    answer. Connections are refused before descriptors run out, because without one neither a client nor a
    replica could be answered.
    """
    num_replicas = max(len(config.backends), 2)
    spare = SPARE_FILES + FILES_PER_REPLICA * num_replicas
    wanted = spare + 2 * config.limits.max_connections + max(config.limits.max_connections, MAX_REFUSALS)
    allowed = allow_open_files(wanted)
    if allowed >= wanted:
        return config
    room = allowed - spare
    most = max(min(room // 3, (room - MAX_REFUSALS) // 2), 1)
    log.warning(
        "at most %d connections are accepted, not %d: the hard limit of open files (ulimit -Hn) is %d",
        most,
        config.limits.max_connections,
        allowed,
    )
    return replace(config, limits=replace(config.limits, max_connections=most))


async def serve(config: RouterConfig, sockets: list[socket.socket]) -> int:
    """Run the router until it is stopped; return the exit code."""
    stopping = Stopping()
    with stop_signals(stopping.take):
        config = with_room_for_connections(config)
        router = RouterProcess(config, prompt_reader_of(config))
        # Objects from start-up live as long as the process, and requests make few cycles. Scanning them all again and again
        # would only cause pauses.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        await router.start(sockets)
        _announce(url_of(sockets[0]), config)
        await stopping.drain.wait()
        log.info("shutting down: %d requests are in flight", len(router.app.exchanges))
        router.app.is_draining = True
        await wait_for(
            lambda: not router.app.exchanges and router.app.edge.is_written, stopping.stop, config.timeouts.drain_s
        )
        await router.close()
    return 0


def _announce(url: str, config: RouterConfig) -> None:
    start = f"Routing to {len(config.backends)} replicas"
    if config.discover:
        start = f"Discovering replicas from {', '.join(config.discover)}, routing"
    print(f"{start} by {config.policy}: {url}", flush=True)
    if config.tokenizer is None:
        print("  without --tokenizer, what replicas have cached is guessed from the bytes of requests", flush=True)
