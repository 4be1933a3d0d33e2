"""`penstock route`: from the command line to a running router, and its end.

The first SIGTERM drains: `/ready` and new requests answer 503, those in flight finish. The second ends it at once.
"""

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable

from penstock import __version__
from penstock.engine.http.limits import Limits
from penstock.engine.http.listen import BACKLOG, bind_socket, url_of
from penstock.engine.text.model_text import load_text
from penstock.executor.process_life import Stopping, stop_signals, wait_for
from penstock.router.app import App
from penstock.router.config import POLICIES, Patience, Prefill, RouteError, RouterConfig, replicas_of, resolve
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.kv_link import KvLinks
from penstock.router.fleet.probe import Prober, ServedModel
from penstock.router.fleet.replica import Replica
from penstock.router.placement.placement import Placement
from penstock.router.placement.policy import PolicyConfig
from penstock.router.placement.prompts import Texts

log = logging.getLogger("penstock.router")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults, limits, patience = RouterConfig(), Limits(), Patience()
    add = parser.add_argument
    add("--backend", action="append", default=[], metavar="URL", help="a replica, http://HOST:PORT; repeat for each")
    add(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="with --prefill, in place of --backend: one that answers",
    )
    add(
        "--prefill",
        action="append",
        default=[],
        metavar="URL=HOST:PORT",
        help="one that computes long prompts, and the --kv-peer by which those of --decode know it",
    )
    add(
        "--prefill-threshold",
        type=int,
        metavar="N",
        help=f"uncached tokens from which a prompt is computed at --prefill (default: {defaults.prefill_threshold})",
    )
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=defaults.port, help="0 takes any free port (default: %(default)s)")
    add("--workers", type=int, default=defaults.workers, metavar="N", help="processes that share the port")
    add("--policy", choices=POLICIES, default=defaults.policy, help="default: %(default)s")
    add("--tokenizer", metavar="MODEL", help="the replicas' model, for its tokenizer: hub name, folder or .gguf file")
    add("--chat-template", metavar="FILE", help="as the replicas were given, if they were")
    add("--api-key", action="append", default=[], metavar="KEY", help="ask clients for this key; repeat for several")
    add("--admin-api-key", action="append", default=[], metavar="KEY", help="whoever has it may change the fleet")
    add("--backend-api-key", metavar="KEY", help="the key that the replicas ask for")
    add("--max-requests", type=int, default=defaults.max_requests, metavar="N", help="under way at one replica")
    add("--max-body-bytes", type=int, default=limits.max_body_bytes, metavar="N", help="limit of a body")
    add("--max-connections", type=int, default=limits.max_connections, metavar="N", help="default: %(default)s")
    add("--response-timeout", type=float, default=patience.response_s, metavar="S", help="without a byte of an answer")
    add("--probe-interval", type=float, default=patience.probe_interval_s, metavar="S", help="default: %(default)g")
    add("--retry-share", type=float, default=patience.retry_share, metavar="X", help="retries per request")
    add("--max-ejected-share", type=float, default=patience.max_ejected_share, metavar="X", help="of the replicas")
    add("--drain-timeout", type=float, default=patience.drain_s, metavar="S", help="default: %(default)g")


def run(args: argparse.Namespace) -> int:
    """RouteError is the user's to mend, and one line on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr)
    config = check(args)
    _say_if_empty(config)
    import uvloop

    from penstock.router.workers import run_workers

    try:
        sock = bind_socket(config.host, config.port, reuse_port=config.workers > 1)
    except OSError as error:
        raise RouteError(f"port: {error.strerror or error}") from None
    with sock:
        return run_workers(config, sock) if config.workers > 1 else uvloop.run(serve_alone(config, sock))


def _say_if_empty(config: RouterConfig) -> None:
    if config.backends:
        return
    if not config.admin_api_keys:
        raise RouteError(
            "backend: no replica is given, and without --admin-api-key none can be added; name each as "
            "--backend http://HOST:PORT"
        )
    log.warning('no replica is there yet: add each with POST /replicas {"url": "http://HOST:PORT"} and the admin key')


def check(args: argparse.Namespace) -> RouterConfig:
    """What will run; RouteError for what cannot."""
    return resolve(_config(args), os.environ)


def _config(args: argparse.Namespace) -> RouterConfig:
    if args.backend and (args.decode or args.prefill):
        raise RouteError("backend: not with --prefill and --decode; a replica that does both is one of --decode")
    if bool(args.decode) != bool(args.prefill):
        given, missing = ("decode", "prefill") if args.decode else ("prefill", "decode")
        raise RouteError(f"{given}: needs --{missing} too; for replicas that do both there is --backend")
    if args.chat_template and not args.tokenizer:
        raise RouteError("chat_template: needs --tokenizer; without it prompts are not rendered here")
    if args.prefill_threshold is not None and not args.prefill:
        raise RouteError("prefill_threshold: needs --prefill; no prompt is computed elsewhere")
    return RouterConfig(
        backends=(*args.backend, *args.decode),
        prefills=tuple(map(Prefill.of, args.prefill)),
        prefill_threshold=(
            RouterConfig().prefill_threshold if args.prefill_threshold is None else args.prefill_threshold
        ),
        host=args.host,
        port=args.port,
        workers=args.workers,
        policy=args.policy,
        api_keys=tuple(args.api_key),
        admin_api_keys=tuple(args.admin_api_key),
        backend_api_key=args.backend_api_key,
        tokenizer=args.tokenizer,
        chat_template=args.chat_template,
        max_requests=args.max_requests,
        limits=Limits(max_body_bytes=args.max_body_bytes, max_connections=args.max_connections),
        patience=Patience(
            response_s=args.response_timeout,
            probe_interval_s=args.probe_interval,
            retry_share=args.retry_share,
            max_ejected_share=args.max_ejected_share,
            drain_s=args.drain_timeout,
        ),
    )


async def serve_alone(config: RouterConfig, sock: socket.socket) -> int:
    stopping = Stopping()
    with stop_signals(stopping.take):
        return await serve(config, sock, stopping, lambda _router: _announce(url_of(sock), config))


class RouterProcess:
    """The running router of one process, on one event loop."""

    def __init__(self, config: RouterConfig, texts: Texts) -> None:
        self.config = config
        self.texts = texts
        self.fleet = Fleet(config, lambda: Placement(PolicyConfig(config.policy)), time.monotonic)
        self.app = App(config, self.fleet, texts, __version__)
        self.prober = Prober(self.fleet, config, self._on_info)
        self.links = KvLinks(self.fleet, config)
        self.app.probe_now = self.prober.watch
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.app.start()
        for url in self.config.backends:
            self.prober.watch(self.fleet.add(url))
        for prefill in self.config.prefills:
            self.prober.watch(self.fleet.add(prefill.url, prefill.peer))
        await self._know_the_fleet()
        self._server = await loop.create_server(self.app.edge.connection, sock=sock, backlog=BACKLOG)

    async def _know_the_fleet(self) -> None:
        """Listen only when every replica has been asked once, or had the time: a worker that joins others, or one
        that is started again, must not say that no replica is there."""
        deadline_s = time.monotonic() + self.config.patience.probe_timeout_s
        while time.monotonic() < deadline_s and any(
            replica.state == "starting" for replica in self.fleet.replicas.values()
        ):
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.app.edge.shutdown()
        await asyncio.sleep(0)
        await self.links.close()
        await self.prober.close()
        self.app.close()
        for replica in self.fleet.replicas.values():
            replica.pool.close()
        self.texts.close()

    def _on_info(self, replica: Replica, model: ServedModel) -> None:
        self.texts.max_model_len = max(self.texts.max_model_len, model.max_model_len or 0)
        if self.texts.digest is not None and model.text_digest not in (None, self.texts.digest):
            log.warning(
                "%s has another tokenizer or chat template than --tokenizer names: it is sent text, and what it has "
                "cached is only guessed",
                replica.url,
            )
        self.links.watch(replica)


def texts_of(config: RouterConfig) -> Texts:
    if config.tokenizer is None:
        return Texts()
    texts = Texts(*load_text(config.tokenizer, config.chat_template))
    if texts.segments is not None and not texts.segments.is_exact:
        log.warning("this tokenizer cannot be cut at special tokens; every prompt is tokenized whole")
    return texts


async def serve(
    config: RouterConfig, sock: socket.socket, stopping: Stopping, on_start: Callable[[RouterProcess], None]
) -> int:
    """Until it has been stopped; the exit code."""
    router = RouterProcess(config, texts_of(config))
    # What start-up made lives as long as the process, and requests make few cycles: scanning all of it again and
    # again would only be heard as pauses.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    await router.start(sock)
    on_start(router)
    await stopping.drain.wait()
    log.info("shutting down: %d requests are in flight", len(router.app.exchanges))
    router.app.is_draining = True
    await wait_for(lambda: not router.app.exchanges, stopping.stop, config.patience.drain_s)
    await router.close()
    return 0


def _announce(url: str, config: RouterConfig) -> None:
    print(f"Routing to {replicas_of(config)} by {config.policy}: {url}", flush=True)
    if config.tokenizer is None:
        print("  without --tokenizer, what replicas have cached is guessed from the bytes of requests", flush=True)
