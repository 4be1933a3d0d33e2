"""Every order of events in a small ring: two readers, three slots, four messages, a crash at every store.

The model takes the steps of executor/ring/queue.py and csrc/ring.c one shared load or store at a time and visits every state
that any interleaving can reach. It knows a store order that all processes agree on, which is what the sequentially
consistent atomics of csrc/ring.c promise for counts, bells and sleepers. A message's bytes are two words, written one
after the other. Then the same exploration is given rings with one step wrong, and must find what that breaks.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

READERS, SLOTS, MESSAGES = 2, 3, 4
WRITER = READERS  # its place among the processes
GONE = -1


class State(NamedTuple):
    at: tuple[int, ...]  # the next step of each process; GONE: it crashed
    words: tuple[int, ...]  # two per slot: the number of the message that each belongs to
    sent: int  # the writer's count
    done: tuple[int, ...]  # the readers' counts
    sleepers: tuple[int, ...]  # by bell: the readers', the writer's
    rung: tuple[int, ...]  # whether the bell has been rung since this process looked at it
    asleep: tuple[int, ...]


START = State((0,) * 3, (0,) * 6, 0, (0,) * 2, (0, 0), (0,) * 3, (0,) * 3)
READER_BELL, WRITER_BELL = 0, 1


class Torn(Exception):
    pass


class Ring(NamedTuple):
    """The protocol. Each field is a rule that a faulty ring breaks."""

    publishes_first: bool = False
    releases_first: bool = False
    slots: int = SLOTS  # that the writer believes in
    waits_for: int = READERS
    looks_before_sleeping: bool = True
    announces_sleep: bool = True
    wakes: bool = True

    def has_room(self, state: State) -> bool:
        return min(state.done[: self.waits_for]) >= state.sent + 1 - self.slots

    def next_states(self, state: State) -> Iterator[State]:
        for process in range(READERS + 1):
            if state.at[process] == GONE:
                continue
            if not state.asleep[process]:
                yield from self.write(state) if process == WRITER else self.read(state, process)
            elif GONE in state.at and self.is_ready(state, process):  # its bell was never rung: it looks every 250 ms
                yield state._replace(asleep=put(state.asleep, process, 0))

    def is_ready(self, state: State, process: int) -> bool:
        return self.has_room(state) if process == WRITER else state.sent > state.done[process]

    # 0 look · 1-3 fall asleep · 4 wake up · 5, 6 the two words · 7 publish · 8 ring
    def write(self, state: State) -> Iterator[State]:
        at, slot = state.at[WRITER], state.sent % SLOTS * 2
        if at in (0, 1, 2, 3, 4):
            if at == 0 and state.sent == MESSAGES:
                return
            yield self.wait(state, WRITER, WRITER_BELL, self.has_room(state), 7 if self.publishes_first else 5)
        elif at in (5, 6):
            number = state.sent + (0 if self.publishes_first else 1)
            slot = (number - 1) % SLOTS * 2
            after = {5: 6, 6: 8 if self.publishes_first else 7}[at]
            yield move(state, WRITER, after)._replace(words=put(state.words, slot + at - 5, number))
        elif at == 7:
            yield move(state, WRITER, 5 if self.publishes_first else 8)._replace(sent=state.sent + 1)
        else:
            yield self.ring(move(state, WRITER, 0), READER_BELL, range(READERS))

    # 0 look · 1-3 fall asleep · 4 wake up · 5, 6 the two words · 7 finish · 8 ring
    def read(self, state: State, reader: int) -> Iterator[State]:
        at, number = state.at[reader], state.done[reader] + 1
        if at in (0, 1, 2, 3, 4):
            if at == 0 and state.done[reader] == MESSAGES:
                return
            there = state.sent >= number
            yield self.wait(state, reader, READER_BELL, there, 7 if self.releases_first else 5)
        elif at in (5, 6):
            number -= self.releases_first
            word = state.words[(number - 1) % SLOTS * 2 + at - 5]
            if word != number:
                raise Torn(f"reader {reader} finds a word of message {word} in message {number}: {state}")
            yield move(state, reader, {5: 6, 6: 8 if self.releases_first else 7}[at])
        elif at == 7:
            after = 5 if self.releases_first else 8
            yield move(state, reader, after)._replace(done=put(state.done, reader, number))
        else:
            yield self.ring(move(state, reader, 0), WRITER_BELL, [WRITER])

    def wait(self, state: State, process: int, bell: int, there: bool, then: int) -> State:
        """penstock_ring_wait: look; sleepers + 1; read the bell; look again; sleep unless it rang; sleepers - 1."""
        at = state.at[process]
        if at == 0:
            return move(state, process, then if there else 1)
        if at == 1:
            return move(self.count_sleeper(state, bell, 1), process, 2)
        if at == 2:
            return move(state, process, 3)._replace(rung=put(state.rung, process, 0))
        if at == 3:
            is_over = (self.looks_before_sleeping and there) or state.rung[process]
            return move(state, process, 4)._replace(asleep=put(state.asleep, process, int(not is_over)))
        return move(self.count_sleeper(state, bell, -1), process, 0)

    def count_sleeper(self, state: State, bell: int, change: int) -> State:
        if not self.announces_sleep:
            return state
        return state._replace(sleepers=put(state.sleepers, bell, state.sleepers[bell] + change))

    def ring(self, state: State, bell: int, whom: Iterable[int]) -> State:
        if not self.wakes or not state.sleepers[bell]:
            return state
        for process in whom:
            state = state._replace(rung=put(state.rung, process, 1), asleep=put(state.asleep, process, 0))
        return state


def move(state: State, process: int, at: int) -> State:
    return state._replace(at=put(state.at, process, at))


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class Found(NamedTuple):
    states: int
    stuck: list[State]  # no process can take a step


def explore(ring: Ring, may_crash: bool) -> Found:
    """Every state that can be reached; at most one process crashes, at any of its steps, asleep or not."""
    known, to_visit, stuck = {START}, [START], []
    while to_visit:
        state = to_visit.pop()
        following = list(ring.next_states(state))
        if not following:
            stuck.append(state)
        if may_crash and GONE not in state.at:
            following += [crash(state, process) for process in range(READERS + 1)]
        for after in following:
            if after not in known:
                check(after)
                known.add(after)
                to_visit.append(after)
    return Found(len(known), stuck)


def crash(state: State, process: int) -> State:
    return move(state, process, GONE)._replace(asleep=put(state.asleep, process, 0))


def check(state: State) -> None:
    """Assert what holds after every step, MessageQueue.check among it."""
    least = min(state.done)
    assert max(state.done) <= state.sent and state.sent - least <= SLOTS, state
    assert max(state.words) - SLOTS <= least, state


def is_finished(state: State) -> bool:
    return state.sent == MESSAGES and all(done == MESSAGES for done in state.done)


@pytest.mark.slow  # this and the next are about the model alone
def test_every_message_reaches_every_reader_whatever_the_order() -> None:
    found = explore(Ring(), may_crash=False)
    assert found.states > 2_000
    assert found.stuck and all(is_finished(state) for state in found.stuck)


@pytest.mark.slow
def test_a_crash_at_any_store_tears_nothing_and_keeps_nobody_from_what_was_sent() -> None:
    found = explore(Ring(), may_crash=True)
    assert found.states > 10_000
    for state in found.stuck:
        for reader in range(READERS):
            if state.at[reader] != GONE:  # it has everything that was published, and waits for more at most
                assert state.done[reader] == state.sent, state
        if state.at[WRITER] != GONE and GONE not in state.at[:READERS]:
            assert is_finished(state), state
        if state.at[WRITER] != GONE and state.sent < MESSAGES:  # it waits for the dead, as its looks every 250 ms show
            dead = state.at.index(GONE)
            assert state.done[dead] == state.sent - SLOTS, state


TORN = [Ring(publishes_first=True), Ring(releases_first=True), Ring(slots=SLOTS + 1), Ring(waits_for=1)]
LOST = [Ring(looks_before_sleeping=False), Ring(announces_sleep=False), Ring(wakes=False)]


@pytest.mark.parametrize("faulty", TORN, ids=["publishes first", "releases first", "a slot too many", "one reader"])
def test_the_exploration_finds_torn_messages(faulty: Ring) -> None:
    with pytest.raises((Torn, AssertionError)):
        explore(faulty, may_crash=False)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", LOST, ids=["no second look", "unannounced", "wakes nobody"])
def test_the_exploration_finds_lost_wake_ups(faulty: Ring) -> None:
    assert not all(is_finished(state) for state in explore(faulty, may_crash=False).stuck)
