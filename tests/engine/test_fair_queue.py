"""Clients take turns in the queue, by the tokens that they use, and which requests are of one client. Time is counted in steps of
the oracle executor."""

import contextlib
import random
from statistics import quantiles
from typing import Any, NamedTuple

import pytest

from penstock.engine.core import fair_queue
from tests.support.refusals import cases
from tests.support.router_fleet import running_router
from tests.support.running_server import running
from tests.support.simulation import World, submit


def one_by_one(**options: Any) -> World:
    """Return an engine that runs one request at a time, so that the order of first tokens is that of the queue."""
    return World(max_num_seqs=1, max_in_flight=1, max_num_batched_tokens=64, **options)


def order(world: World) -> list[str]:
    """Run everything; return the requests in the order of their first tokens."""
    begun: list[str] = []
    while world.scheduler.has_work():
        world.step()
        begun += [name for name, outputs in world.outputs.items() if outputs and name not in begun]
    return begun


class Sent(NamedTuple):
    """A request of a client: "A" or "B", or a client that is not named."""

    client: str
    num_prompt: int = 8
    priority: int = 0
    max_tokens: int = 1


@pytest.mark.parametrize(("name", "sent", "expected"), cases(__file__, "turns of clients", Sent=Sent))
def test_clients_take_turns_by_the_tokens_that_they_use(name: str, sent: list[Sent], expected: str) -> None:
    world = one_by_one(enable_prefix_caching=False)
    for number, (client, num_prompt, priority, max_tokens) in enumerate(sent):
        options = {"priority": priority, "client": client.encode()}
        world.submit(submit(str(number), [number] * num_prompt, max_tokens, **options))
    assert "".join(order(world)) == expected


def test_cached_prompt_tokens_cost_nothing() -> None:
    world = one_by_one()
    world.cached("before", [1] * 41, max_tokens=1)
    for number in range(3):
        world.submit(submit(f"A{number}", [1] * 41, 1, client=b"A"))
    for number in range(8):
        world.submit(submit(f"B{number}", [2 + number] * 4, 1, client=b"B"))
    assert order(world)[1:7] == ["A0", "B0", "A1", "A2", "B1", "B2"]


def test_an_idle_client_has_no_advantage_later_and_use_of_a_free_engine_is_no_debt() -> None:
    world = one_by_one(enable_prefix_caching=False)
    for number in range(50):
        world.submit(submit(f"alone{number}", [3] * 30, 1, client=b"A"))
        world.run()
    for client, count in (("A", 20), ("B", 1)):
        for number in range(count):
            world.submit(submit(f"{client}{number}", [number] * 8, 1, client=client.encode()))
    world.step()
    assert world.outputs["A0"], "what A used while nobody waited does not count"
    for _ in range(9):
        world.step()
    for number in range(1, 6):
        world.submit(submit(f"B{number}", [number] * 8, 1, client=b"B"))
    begun = order(world)
    assert "".join(name[0] for name in begun[begun.index("B1") :][:8]) == "BABABABA"


@pytest.mark.parametrize(("client", "priority", "num_waiting", "planned"), cases(__file__, "requests that overtake"))
def test_requests_overtake_a_long_prompt_of_a_client_that_has_used_more(
    client: str, priority: int, num_waiting: int, planned: list[tuple[str, int, int]]
) -> None:
    world = World(max_num_batched_tokens=10, max_in_flight=1)
    for number in range(1 + num_waiting):
        world.submit(submit(f"A{number}", [number] * 40, client=b"A"))
    world.step()
    for number in range(2):
        world.submit(submit(f"short{number}", [2 + number] * 3, client=client.encode(), priority=priority))
    step, names = world.plan(), {request.slot: request.message for request in world.scheduler.running}
    assert [(names[row.slot].client.decode(), row.start, row.count) for row in step.rows] == planned


def test_a_preempted_request_keeps_its_turn() -> None:
    world = one_by_one(enable_prefix_caching=False)
    world.submit(submit("A", [1] * 40, 3, client=b"A"))
    world.step()
    for number in range(3):
        world.submit(submit(f"B{number}", [2] * 4, 1, client=b"B"))
    world.scheduler._preempt(next(iter(world.scheduler.running)))
    world.step()
    assert [request.message.request_id for request in world.scheduler.running] == ["A"]


def test_a_late_request_counts_as_urgent_and_takes_turns_with_those_of_other_clients() -> None:
    """A long queue makes every request of a client late, which must not put it before the others."""
    world = one_by_one(patience_s=20.0, enable_prefix_caching=False)
    for number in range(60):
        world.submit(submit(f"A{number}", [number % 50] * 40, 1, client=b"A"))
    world.submit(submit("low", [1] * 4, 1, client=b"A", priority=9))
    for _ in range(40):
        world.step()
    for number in range(3):
        world.submit(submit(f"B{number}", [number] * 4, 1, client=b"B"))
    begun = order(world)
    assert begun.index("B2") < 46 and begun.index("low") < 64


def test_the_order_of_a_single_client_is_that_of_priority_and_arrival() -> None:
    rng = random.Random(5)
    world = one_by_one(patience_s=30.0)
    priorities = [rng.choice([0, 0, 3, 7]) for _ in range(100)]
    for number, priority in enumerate(priorities):
        world.submit(submit(str(number), [1] * 4, 1, priority=priority, client=b"A"))
    waiting, expected = list(range(100)), []
    for step in range(100):
        by_priority = min(waiting, key=lambda number: (priorities[number], number))
        expected.append(waiting[0] if step + 1.0 > 30.0 else by_priority)
        waiting.remove(expected[-1])
    assert order(world) == list(map(str, expected))


def test_only_a_bounded_number_of_clients_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MOST_IDLE", 5)
    world = World()
    world.submit(submit("long", [1] * 4, 50, client=b"long"))
    for number in range(30):
        world.submit(submit(str(number), [2] * 4, 1, client=str(number).encode()))
        world.step()
        assert len(world.scheduler.waiting._tags) <= len(world.scheduler.waiting) + 7
    assert world.end("long") is None, "the engine was never idle"


class Served(NamedTuple):
    p95: float  # steps until the first token of the other clients' requests
    num_steps: int  # of everything
    flood_ends: int  # step of the last first token of the flood


def flooded(has_names: bool, num_others: int = 40) -> Served:
    """One client sends 40 long prompts at once, others a short one every few steps."""
    world = World(num_blocks=2000, max_num_batched_tokens=64, max_model_len=512)
    rng, begun, first = random.Random(1), dict[str, int](), dict[str, int]()
    for number in range(40):
        prompt = [rng.randrange(50) for _ in range(320)]
        world.submit(submit(f"flood{number}", prompt, 8, client=b"flood" if has_names else b""))
    step = 0
    while world.scheduler.has_work():
        if step % 4 == 3 and len(begun) < num_others:
            name, client = f"other{step}", b"BC"[step % 8 // 4 :][:1] if has_names else b""
            world.submit(submit(name, [rng.randrange(50) for _ in range(12)], 4, client=client))
            begun[name] = step
        world.step(check=False)
        step += 1
        first |= {name: step for name, outputs in world.outputs.items() if outputs and name not in first}
    waits = [first[name] - at for name, at in begun.items()]
    flood_ends = max(at for name, at in first.items() if name not in begun)
    return Served(quantiles(waits, n=20)[-1] if waits else 0.0, step, flood_ends)


def test_a_flood_of_long_prompts_does_not_hold_up_other_clients() -> None:
    queued, fair = flooded(has_names=False), flooded(has_names=True)
    print(queued, fair)
    assert queued.p95 > 20 * fair.p95 and fair.p95 <= 4
    assert fair.num_steps <= 1.02 * queued.num_steps and fair.flood_ends <= 1.1 * queued.flood_ends
    assert flooded(has_names=True, num_others=0) == flooded(has_names=False, num_others=0)


KEYS = ("sk-1", "sk-2")
BY_SESSION = [{}, {}, {"x-session-id": "a"}, {"x-session-id": "b"}, {"x-session-id": "a"}]
BY_KEY = [{"x-api-key": key, "x-session-id": session} for key, session in zip("1221", "aaba", strict=True)]


@pytest.mark.parametrize(
    ("which", "keys", "router_keys", "headers", "expected"), cases(__file__, "clients of requests", **globals())
)
def test_requests_are_told_apart_by_key_and_without_keys_by_session(
    which: str, keys: tuple[str, ...], router_keys: tuple[str, ...] | None, headers: list[dict[str, str]], expected: str
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(api_keys=keys))
        http = server.http
        if router_keys is not None:
            backend_key = keys[0] if keys else None
            router = running_router(server.url, api_keys=router_keys, backend_api_key=backend_key)
            http = stack.enter_context(router).http
        for each in headers:
            sent = each | ({"x-api-key": f"sk-{each['x-api-key']}"} if "x-api-key" in each else {})
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
            assert http.post("/v1/completions", json=body, headers=sent).status_code == 200
    clients = [options["client"] for *_, options in server.engine.submitted]
    assert "".join(str(list(dict.fromkeys(clients)).index(client)) for client in clients) == expected
