"""Replicas that do not take their turn: a canary gets a share of its model's requests in place of the others, a shadow
gets a share beside them, and its answers are dropped."""

import random
from typing import TYPE_CHECKING

from penstock.router.fleet.fleet import ReplicaGroup
from penstock.router.fleet.replica import Replica
from penstock.router.http.upstream import ConnectFailed, fetch

if TYPE_CHECKING:
    from penstock.router.app import RouterApp
    from penstock.router.exchange import Outgoing

MOST_SHADOWS = 64  # in flight; beyond them none is sent, for they must not hold up anything


def drawn(group: ReplicaGroup) -> frozenset[str]:
    """Who is left out of this request: all but one canary, or all that stand aside."""
    lot = random.random()
    for url in group.aside:
        replica = group.replicas[url]
        lot -= replica.backend.canary or 0.0
        if lot < 0 and replica.is_up:
            return frozenset(group.replicas) - {url}
    return group.aside


def cast_shadows(app: "RouterApp", group: ReplicaGroup, outgoing: "Outgoing", method: bytes) -> None:
    for url in group.aside if method == b"POST" else ():
        replica = group.replicas[url]
        if (share := replica.backend.shadow) is None or random.random() >= share:
            continue
        if app.num_shadows >= MOST_SHADOWS or not replica.is_up:
            app.metrics.counts["shadows", "skipped"] += 1
        else:
            app.num_shadows += 1
            app.spawn(_shadow(app, replica, outgoing))


async def _shadow(app: "RouterApp", replica: Replica, outgoing: "Outgoing") -> None:
    # The last line of the client's headers is the content type, which `fetch` writes itself.
    lines = outgoing.lines.rpartition(b"content-type:")[0] + (replica.key_line or outgoing.client_key)
    try:
        path = outgoing.target.decode("latin-1")
        status, _ = await fetch(replica.pool, path, lines, app.config.patience.response_s, outgoing.body)
        app.metrics.counts["shadows", str(status)] += 1
    except (ConnectFailed, TimeoutError):
        app.metrics.counts["shadows", "failed"] += 1
    finally:
        app.num_shadows -= 1
