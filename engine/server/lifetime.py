"""The lifetime of the server: listens, drains on the first signal, stops on the second, exits when the engine is dead.

During a drain the listener stays open: new requests get a 503 while requests in flight finish, so a load balancer gets
a response instead of a refused connection.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from penstock.engine.http.listen import Listener
from penstock.engine.http.sockets import url_of
from penstock.engine.server.app import ServerApp
from penstock.engine.server.kv_publisher import KvPublisher
from penstock.engine.server.service import Service
from penstock.executor.process_life import Stopping, stop_signals, wait_for

log = logging.getLogger("penstock.engine")

LAST_WORDS_S = 2.0  # time to send the ends of aborted or failed answers


async def serve(service: Service, sockets: list[socket.socket], on_listening: Callable[[str], None]) -> int:
    """Serve a started engine until a signal or the engine's death; return the exit code. The caller closes the engine.

    `service`: its configuration is resolved; it is closed at the end. `sockets`: from `bind_sockets`, which binds the port before the model is loaded.
    """
    app, config, engine = ServerApp(service), service.config, service.engine
    await service.adapters.load_all(config.lora_modules)
    stopping = Stopping()
    with stop_signals(stopping.take), contextlib.ExitStack() as at_the_end:
        at_the_end.callback(service.close)  # runs after the last request has ended
        listener = Listener(app, sockets, config.limits, service.metrics.refused)
        if config.kv_events_config is not None and config.kv_events_config.is_on:
            publisher = KvPublisher(service.info, config.kv_events_config)
            publisher.start()
            at_the_end.callback(publisher.close)
            app.kv_events.publish_to(publisher.publish)
            at_the_end.callback(app.kv_events.publish_to, None)
        async with listener:
            on_listening(url_of(sockets[0]))
            await wait_for(lambda: not engine.health().alive, stopping.drain)
            if not stopping.drain.is_set():
                return await _leave_dead(service)
            await _drain(service, config.drain_timeout_s, stopping.stop)
            return 0 if engine.health().alive else 1


async def _drain(service: Service, timeout_s: float, stop: asyncio.Event) -> None:
    """Wait for requests in flight; after the timeout, abort them so that they end with their output so far."""
    service.is_draining = True
    log.info(
        "shutting down: waiting up to %g s for %d requests; a second signal (Ctrl-C) ends them at once",
        timeout_s,
        service.num_open_requests,
    )
    await wait_for(lambda: service.num_open_requests == 0, stop, timeout_s)
    if service.num_open_requests and not stop.is_set():
        log.warning("%d requests did not finish in %g s and are ended", service.num_open_requests, timeout_s)
        service.engine.abort([*service.engine.answers])  # their readers still get the last update
        await wait_for(lambda: service.num_open_requests == 0, stop, LAST_WORDS_S)


async def _leave_dead(service: Service) -> int:
    """Close an engine that is dead or hangs. Every request ends with an error that is still sent to its client."""
    reason = service.engine.health().reason
    for line in reason.splitlines():  # the error of a rank has its traceback
        log.error("the engine has failed: %s", line)
    service.is_draining = True
    await service.engine.close(reason)
    await wait_for(lambda: service.num_open_requests == 0, asyncio.Event(), LAST_WORDS_S)
    return 1
