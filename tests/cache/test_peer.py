"""The peer tier over loopback: both ends as they are, and one end against peers that do everything wrong."""

import random
from pathlib import Path

import msgspec
import pytest
import zmq
from xxhash import xxh3_64_intdigest

from penstock.cache.tiers.health import HealthLimits
from penstock.cache.tiers.peer import server as peer_server
from penstock.cache.tiers.peer.address import read_address, read_secret
from penstock.cache.tiers.peer.store import Load, PeerTier
from penstock.cache.tiers.peer.wire import Block, Get, Miss, checksum_seed, curve_keys
from tests.support.peer_rig import (
    CHUNK,
    FINGERPRINT,
    QUICK,
    SECRET,
    Answer,
    LyingPeer,
    Send,
    Source,
    content,
    ended,
    key,
    opened,
    right,
    serving,
    tier,
    until,
)
from tests.support.refusals import table

KEYS = [key(number) for number in range(40)]


def hear_all(peer: PeerTier) -> None:
    until(lambda: len(peer) == len(KEYS), "the peer says what it has")


def load(peer: PeerTier, *block_numbers: int) -> list[bool]:
    """Load those of these blocks that the peer has announced, and return which loads ended well. A buffer has the right
    content then; otherwise nothing has touched it."""
    buffers = {number: bytearray(b"\xaa" * CHUNK) for number in block_numbers}
    tickets = {number: peer.start_load(KEYS[number], buffer) for number, buffer in buffers.items()}
    started = {ticket: number for number, ticket in tickets.items() if ticket is not None}
    ends = ended(peer, len(started))
    assert ends.keys() == started.keys()
    for ticket, ok in ends.items():
        number = started[ticket]
        assert buffers[number] == (content(number) if ok else b"\xaa" * CHUNK)
    return list(ends.values())


def test_blocks_come_by_key_from_memory_and_disk() -> None:
    with serving(Source()) as server, tier(server.endpoint) as peer:
        hear_all(peer)
        assert peer.contains(KEYS[0]) and not peer.contains(key(99))
        assert sorted(peer.changes()[0]) == sorted(KEYS) and peer.changes() == ([], [])
        assert load(peer, *range(40)) == [True] * 40
        assert peer.start_load(key(99), bytearray(CHUNK)) is None
        stats = peer.stats()
        assert (stats["hits"], stats["loaded_bytes"], stats["failures"]) == (40, 40 * CHUNK, {})
        assert server.stats()["blocks"] == 40
        peer.check()


def test_what_comes_and_goes_at_the_peer_is_heard() -> None:
    ours = Source()
    with serving(ours) as server, tier(server.endpoint) as peer:
        hear_all(peer)
        peer.changes()
        ours.add(77)
        ours.remove(3)
        server.call()
        until(lambda: peer.contains(key(77)) and not peer.contains(KEYS[3]), "the changes")
        assert peer.changes() == ([key(77)], [KEYS[3]])
        ours.remove(77)
        server.call()
        until(lambda: not peer.contains(key(77)), "it goes again")
        ours.add(77)
        server.call()
        until(lambda: peer.contains(key(77)), "and comes back")
        assert peer.changes() == ([], []), "what went and came back has not changed"


@pytest.mark.parametrize(("server_secret", "secret"), [(SECRET, ""), (SECRET, SECRET + "!"), ("", SECRET)])
def test_no_end_believes_another_secret_even_if_it_knows_the_servers_key(
    server_secret: str, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (keys := curve_keys(secret)) and (known := curve_keys(server_secret)):
        keys = keys._replace(server_public=known.server_public)
    monkeypatch.setattr("penstock.cache.tiers.peer.lanes.curve_keys", lambda _: keys)
    with serving(Source(), secret=server_secret) as server, tier(server.endpoint, secret=secret) as peer:
        until(lambda: peer.stats()["failed_handshakes"] >= 2, "it is turned away and tries again")
        until(lambda: bool(caplog.messages), "it is said")
        assert caplog.messages == [f"peer {server.endpoint}: handshakes fail; both ends need the same secret"]
        assert len(peer) == server.stats()["clients"] == 0 and not peer.stats()["is_open"]


def test_a_peer_whose_bytes_mean_something_else_is_refused() -> None:
    with serving(Source()) as server, tier(server.endpoint, fingerprint=b"x" * 32) as peer:
        until(lambda: peer.stats()["refused"] >= 2, "it is refused, and refused again")
        assert len(peer) == 0 and not peer.stats()["is_open"] and server.stats()["clients"] == 0
        assert peer.start_load(KEYS[0], bytearray(CHUNK)) is None


def wrongly(
    num_payloads: int = 1, number: int | None = None, size: int = CHUNK, fingerprint: bytes = FINGERPRINT, flip: int = 0
) -> Answer:
    """Answer with a block that differs in some way from the right one."""

    def answer(get: Get, send: Send) -> None:
        data = content(get.key[3] if number is None else number)[:size]
        checksum = xxh3_64_intdigest(data, checksum_seed(fingerprint)) ^ flip
        send(Block(get.ticket, get.key if number is None else key(number), checksum), *num_payloads * [data])

    return answer


@pytest.mark.parametrize(("answer", "reason"), table(__file__, "answers of peers", **globals()))
def test_a_wrong_answer_is_a_miss_and_touches_nothing(answer: Answer, reason: str) -> None:
    with LyingPeer(KEYS, answer) as liar, tier(liar.endpoint) as peer:
        hear_all(peer)
        peer.changes()
        assert load(peer, 5) == [False]
        assert peer.changes() == ([], [KEYS[5]]) and peer.stats()["failures"] == {reason: 1}
        assert peer.stats()["corrupt_reads"] == (reason != "gone")


@pytest.mark.parametrize("noise", table(__file__, "messages of peers"))
def test_noise_does_no_harm_to_either_end(noise: bytes) -> None:
    def answer(get: Get, send: Send) -> None:
        send(noise)
        send(b"", b"")
        right(get, send)

    with LyingPeer(KEYS, answer) as liar, tier(liar.endpoint) as peer:
        hear_all(peer)
        assert load(peer, 5) == [True]
    with serving(Source()) as server, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(server.endpoint)
        for message in (noise, b"", msgspec.msgpack.encode(Get(1, KEYS[5]))):
            client.send(message)
        until(lambda: bool(client.poll(0)), "it answers")


def test_a_stalled_peer_writes_no_buffer_after_the_deadline() -> None:
    kept: list[tuple[Get, Send]] = []

    def answer_all(get: Get, send: Send) -> None:
        for each in (*kept, (get, send)):
            right(*each)

    limits = QUICK._replace(deadline_s=0.2, window_bytes=2 * CHUNK)
    with (
        LyingPeer(KEYS, lambda get, send: kept.append((get, send))) as liar,
        tier(liar.endpoint, limits=limits) as peer,
    ):
        hear_all(peer)
        buffer = bytearray(b"\xaa" * CHUNK)
        tickets = [peer.start_load(each, buffer) for each in KEYS[:5]]
        assert ended(peer, 5) == dict.fromkeys(tickets, False)
        assert peer.stats()["failures"] == {"late": 5}
        assert len(kept) == 2, "no more is asked for than the window allows"
        liar.answer, peer._limits = answer_all, QUICK
        assert load(peer, 9) == [True]
        assert peer.stats()["late_reads"] == 2 and buffer == b"\xaa" * CHUNK


def test_a_silent_peer_is_bypassed_and_comes_back() -> None:
    limits = QUICK._replace(health=HealthLimits(stall_s=0.15, first_pause_s=0.05, longest_pause_s=0.1))
    with LyingPeer(KEYS, lambda *each: None) as liar, tier(liar.endpoint, limits=limits) as peer:
        hear_all(peer)
        liar.greets = False
        assert load(peer, 0, 1, 2) == [False] * 3
        assert len(peer) == 0 and peer.stats()["failures"] == {"stalled": 3}
        until(lambda: liar.num_greetings >= 3, "it is asked again and again")
        liar.greets, liar.answer = True, right
        until(lambda: len(peer) == 40, "it is back")
        peer._limits = QUICK
        assert load(peer, 3) == [True]


def test_a_peer_with_three_wrong_answers_is_bypassed_and_found_again_if_it_dies_while_it_is_probed() -> None:
    limits = QUICK._replace(health=QUICK.health._replace(stall_s=3600.0))
    with LyingPeer(KEYS, wrongly(flip=1)) as liar, tier(liar.endpoint, limits=limits) as peer:
        hear_all(peer)
        liar.greets = False
        assert load(peer, 0, 1, 2) == [False] * 3
        until(lambda: liar.num_greetings == 2, "it is probed")
        assert peer.stats()["bypasses"] == 1
        liar.close()
        with serving(Source(range(2), range(0)), liar.endpoint):
            until(lambda: len(peer) == 2, "another one at the same address is found by itself")


def test_busy_and_late_answers_do_not_put_off_a_greeting() -> None:
    with tier("tcp://127.0.0.1:1") as peer, peer._lock:  # the tier's own thread waits for it
        peer._greet_at_s = 0.0  # due on every machine, however long ago it booted
        for ticket in (1, 2):
            peer._sent[ticket] = Load(ticket, KEYS[ticket], memoryview(b""), 0.0)
        peer._handle_reply(Miss(1, "busy"), [])
        peer._end_late_loads(1e12)
        assert peer._greet_at_s == 0.0 and not peer._sent


def test_a_peer_that_dies_fails_all_its_reads_and_loses_its_keys() -> None:
    with LyingPeer(KEYS, lambda *each: None) as liar, tier(liar.endpoint) as peer:
        hear_all(peer)
        peer.changes()
        tickets = [peer.start_load(each, bytearray(CHUNK)) for each in KEYS]
        until(lambda: len(liar.requests) > 0, "it is asked")
        liar.close()
        assert ended(peer, 40) == dict.fromkeys(tickets, False)
        until(lambda: len(peer) == 0, "its keys are dropped")
        assert sorted(peer.changes()[1]) == sorted(KEYS)
        assert peer.stats()["failures"] == {"disconnected": 40} and peer.stats()["lost_connections"] == 1
        with serving(Source(range(2), range(0)), liar.endpoint) as server:
            until(lambda: len(peer) == 2, "another one at the same address is found by itself")
            assert server.stats()["clients"] == 1


def test_reads_beyond_the_budget_of_bytes_are_refused_and_offered_again() -> None:
    ours = Source(range(0), range(40))
    ours.disk.is_stalled = True
    with serving(ours, serve_bytes=2 * CHUNK) as server, tier(server.endpoint) as peer:
        hear_all(peer)
        for each in KEYS[:5]:
            peer.start_load(each, bytearray(CHUNK))
        assert ended(peer, 3) and peer.stats()["failures"] == {"busy": 3}
        assert server.stats()["misses"] == {"busy": 3} and len(peer) == 37
        until(lambda: len(peer) == 40, "what was refused is announced again")


def test_loads_that_fail_at_the_peer_give_its_bytes_back() -> None:
    ours = Source(range(0), range(40))
    ours.disk.fails_load = 1.0
    with serving(ours, serve_bytes=2 * CHUNK) as server, tier(server.endpoint) as peer:
        hear_all(peer)
        assert [load(peer, number) for number in range(6)] == [[False]] * 6
        assert peer.stats()["failures"] == {"gone": 6}


def test_every_load_ends_once_also_at_the_end() -> None:
    with LyingPeer(KEYS, lambda *each: None) as liar:
        peer = opened(liar.endpoint)
        hear_all(peer)
        tickets = [peer.start_load(each, bytearray(CHUNK)) for each in KEYS]
        peer.close()
        assert ended(peer, 40) == dict.fromkeys(tickets, False)
        assert peer.start_load(KEYS[0], bytearray(CHUNK)) is None


def test_a_peer_may_announce_no_more_keys_than_the_limit() -> None:
    with serving(Source()) as server, tier(server.endpoint, max_keys=10) as peer:
        until(lambda: peer.stats()["ignored_keys"] == 30, "the rest is not heard")
        assert len(peer) == 10
        peer.check()


def test_many_readers_and_a_source_that_changes_never_give_wrong_bytes() -> None:
    rng = random.Random(3)
    ours, in_memory = Source(), set(range(30))
    with serving(ours, serve_bytes=16 * CHUNK, secret=SECRET) as server:
        peers = [opened(server.endpoint, secret=SECRET) for _ in range(3)]
        num_loaded = 0
        for peer in peers:
            hear_all(peer)
        for _ in range(40):
            number = rng.randrange(30)
            (ours.remove if number in in_memory else ours.add)(number)
            in_memory ^= {number}
            server.call()
            for peer in peers:
                num_loaded += sum(load(peer, *rng.sample(range(40), 6)))
        for peer in peers:
            peer.check()
            peer.close()
        assert num_loaded > 50  # fewer the more are lost to the budget


@pytest.mark.parametrize(("text", "message"), table(__file__, "peer addresses"))
def test_addresses_that_cannot_be_meant_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_address("kv_peers", text, num_ranks=2)


def test_each_rank_has_a_port_of_its_own() -> None:
    assert read_address("kv_peers", "10.0.0.5:9100", 4).of_rank(3) == "tcp://10.0.0.5:9103"
    assert read_address("kv_peers", "[::1]:9100").of_rank(0) == "tcp://[::1]:9100"
    assert read_address("kv_peers", "localhost:9100").of_rank(0) == "tcp://127.0.0.1:9100"
    loopback = {"127.0.0.1:1": True, "127.8.0.1:1": True, "localhost:1": True, "[::1]:1": True, "10.0.0.5:1": False}
    assert {text: read_address("kv_peers", text).is_loopback for text in loopback} == loopback


def test_a_secret_comes_from_a_file_or_the_environment_and_must_be_one(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    name = "PENSTOCK_KV_PEER_SECRET"
    assert read_secret("", {}) == "" and read_secret(str(file), {name: "something else entirely"}) == SECRET
    assert read_secret("", {name: SECRET}) == SECRET
    file.write_text("")
    for path, secret, message in table(__file__, "secrets of peers", empty=str(file)):
        with pytest.raises(ValueError, match=message):
            read_secret(path, {name: secret})


def test_engines_that_came_and_went_leave_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is announced meanwhile, which would show who has left."""
    monkeypatch.setattr(peer_server, "MAX_CLIENTS", 3)
    with serving(Source()) as server:
        for _ in range(5):
            with tier(server.endpoint) as peer:
                hear_all(peer)
        with tier(server.endpoint), tier(server.endpoint), tier(server.endpoint) as last:
            hear_all(last)
            with tier(server.endpoint) as more:
                until(lambda: bool(more.stats()["refused"]), "the fourth at a time is refused")
