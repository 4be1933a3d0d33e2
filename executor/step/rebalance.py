"""Moves experts between the ranks when their load changes, while steps continue.

All ranks count the same tokens. At every `interval`-th step the first rank computes a plan in a separate thread, and
sends it to the others at a step boundary. Then a thread on each rank copies the experts of one layer into spare memory,
over separate connections. At the first boundary at which all ranks have them, all ranks put them in place and use the
new plan for that layer. Until then the old plan applies. It also continues to apply to all remaining layers if a
transfer fails: each layer follows either plan completely.

Every collective here runs at a step boundary, where all ranks are at the same step.
"""

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from penstock.eplb import LoadTracker, Plan, balance, replan, transfers
from penstock.eplb.maps import rank_loads
from penstock.executor.models.moe import ExpertCounter, Experts
from penstock.executor.parallel import CollectiveError, RankGroup
from penstock.executor.protocol import EplbConfig, ExpertUpdate

ASK_EVERY = 8  # steps between checks for a plan while the first rank computes one
RUNNING, ARRIVED, FAILED = 1, 2, 0  # ordered: the minimum over the ranks decides
NOTHING, SKIPPED, PLANNED, BROKEN = 0, 1, 2, 3


@dataclass
class Move:
    """The transfer of one layer's experts into this rank's spare memory."""

    layer: int
    copies: list[tuple[int, list[int]]]  # (source slot of an expert, slots of one rank that need it)
    arrivals: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # own slot → its new tensors
    state: int = RUNNING


class Rebalancer:
    def __init__(
        self, config: EplbConfig, plan: Plan, layers: list[Experts], group: RankGroup, links: RankGroup
    ) -> None:
        """`links` has the same ranks as `group` but separate connections, because transfers run beside steps."""
        self._config, self._layers = config, layers
        self._plan = plan  # the current plan; while layers move, the next one applies to those that have moved
        self._group, self._links = group, links
        self._counts = torch.zeros(len(layers), layers[0].num_experts, dtype=torch.int64, device=group.device)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=group.device)  # of the step; 0 during captures
        for experts, counts in zip(layers, self._counts, strict=True):
            experts.counter = ExpertCounter(counts, self._num_tokens)
        self._tracker = LoadTracker(len(layers), layers[0].num_experts, window=config.window)
        self._expert_bytes = sum(tensor.nbytes for tensor in layers[0].expert_slots[0].tensors())
        self._first = group.rank * plan.slots_per_rank
        # Transfers run beside steps on a GPU too. On the steps' own stream two ranks could deadlock: one rank's
        # transfer waits behind an all-reduce that the other rank, which waits for the transfer, has not started.
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._num_steps = self._counted_at = 0
        # The result of the planning thread: a plan, if one is worth it, and statistics.
        self._proposal: tuple[Plan | None, dict[str, float | bytes]] | None = None
        self._update = self._reported = ExpertUpdate(balance=1.0)
        self._process = self._rebalance()

    def boundary(self, num_tokens: int) -> None:
        """Prepare for a step of `num_tokens` tokens. Called before every step, on all ranks."""
        self._num_tokens.fill_(num_tokens)
        self._num_steps += 1
        started_s = time.perf_counter()
        if next(self._process, False):
            self._note(stall_s=self._update.stall_s + time.perf_counter() - started_s)

    def take_update(self) -> ExpertUpdate | None:
        """Return the update if it has changed since the last call, else None."""
        if self._update is self._reported:
            return None
        self._reported = self._update
        return self._update

    def _rebalance(self) -> Iterator[bool]:
        """Plan and move experts; every `yield` waits for the next step boundary, and tells whether this one took time.

        It ends after a failure: transfers cannot be trusted any more, and every layer keeps the plan that it follows."""
        while True:
            while self._num_steps % self._config.interval:
                yield False
            planning, result = self._start_planning(), None
            while result is None:
                yield True
                if self._num_steps % ASK_EVERY == 0:
                    result = self._receive(planning)
            status, numbers = result
            if status == SKIPPED:
                self._note(num_skipped=self._update.num_skipped + 1)
            elif status == BROKEN or not (yield from self._follow(numbers)):
                self._note(num_aborted=self._update.num_aborted + 1)
                return
            yield True

    def _follow(self, received: torch.Tensor) -> Generator[bool, None, bool]:
        """Move layer by layer to the plan that was received; return False if a transfer failed on any rank."""
        phy2log, weight = received.cpu().numpy().reshape(2, *self._plan.phy2log.shape)
        target = self._plan.with_(phy2log, weight)
        self._agree_on(target)
        moved = transfers(self._plan, target, self._plan.ranks)
        changed = (target.phy2log != self._plan.phy2log) | (target.weight != self._plan.weight)
        for layer in np.flatnonzero(changed.any(1)).tolist():
            move = self._start_move(layer, moved)
            state = RUNNING
            while state == RUNNING:
                yield True
                state = self._group.minimum(move.state)
            if state == FAILED:
                return False
            self._put_in_place(move, target)
        self._plan = target
        if len(moved):
            self._note(num_rebalances=self._update.num_rebalances + 1)
        else:
            self._note(num_reweights=self._update.num_reweights + 1)
        return True

    def _start_planning(self) -> threading.Thread | None:
        """Fetch all layers' counts with one small copy, and start the planning thread on the first rank."""
        self._tracker.add(self._counts.cpu().numpy(), self._num_steps - self._counted_at)
        self._counts.zero_()
        self._counted_at = self._num_steps
        if not self._group.is_first:
            return None
        planning = threading.Thread(target=self._make_plan, args=(self._tracker.load(),), daemon=True)
        planning.start()
        return planning

    def _make_plan(self, load: np.ndarray) -> None:
        started_s = time.perf_counter()
        now = balance(load, self._plan)
        plan: Plan | None = replan(load, self._plan, target=self._config.target, max_moves=self._config.max_moves)
        assert plan is not None
        moved = transfers(self._plan, plan, self._plan.ranks)
        depth = plan.slots_per_rank
        remote = int((moved[:, 2] // depth != moved[:, 3] // depth).sum())
        gain = float((balance(load, plan) - now).mean())
        if gain <= 0 or gain < self._config.min_gain_per_gib * remote * self._expert_bytes / 2**30:
            plan = None
        by_rank = rank_loads(load, self._plan.phy2log, self._plan.weight, self._plan.ranks)
        shares = {"rank_load": _shares(by_rank), "expert_load": _shares(load)}
        plan_s = self._update.plan_s + time.perf_counter() - started_s
        self._proposal = plan, {"balance": float(now.mean()), "plan_s": plan_s, **shares}

    def _receive(self, planning: threading.Thread | None) -> tuple[int, torch.Tensor] | None:
        """Receive the first rank's status and plan; None while it computes."""
        message = torch.zeros(1 + 2 * self._plan.phy2log.size, dtype=torch.int32, device=self._group.device)
        if planning is not None and not planning.is_alive():
            self._fill(message)
        status = int(self._group.broadcast(message)[0])
        return None if status == NOTHING else (status, message[1:])

    def _fill(self, message: torch.Tensor) -> None:
        """Write the result of the planning thread to the message for the other ranks."""
        proposal, self._proposal = self._proposal, None
        if proposal is None:  # the thread failed; its traceback is on standard error
            message[0] = BROKEN
            return
        plan, found = proposal
        message[0] = SKIPPED
        if plan is not None:
            message[0] = PLANNED
            placed = np.concatenate([plan.phy2log.ravel(), plan.weight.ravel()])
            message[1:] = torch.from_numpy(placed.astype(np.int32))
        self._note(**found)

    def _agree_on(self, plan: Plan) -> None:
        digest = int.from_bytes(plan.digest()[:7], "little")
        least, most = self._group.minimum(digest), -self._group.minimum(-digest)
        assert least == most, "the ranks have received different plans"

    def _start_move(self, layer: int, moved: np.ndarray) -> Move:
        """Start the transfers of a layer; `moved` [n, 4] are those of all layers."""
        move = Move(layer, self._layer_copies(layer, moved))
        if self._stream is not None:  # weights that were put in place so far may be sent
            self._stream.wait_stream(torch.cuda.current_stream(self._group.device))
        threading.Thread(target=self._bring, args=(move,), daemon=True).start()
        return move

    def _bring(self, move: Move) -> None:
        """Fill the spare memory with the new content of this rank's slots; runs in a separate thread."""
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for source, slots in move.copies:
                    self._run(move, source, slots)
            move.state = ARRIVED
        except CollectiveError:
            pass
        finally:  # on any error, even out of memory: step boundaries must not wait for this rank forever
            if move.state == RUNNING:
                move.state = FAILED

    def _layer_copies(self, layer: int, moved: np.ndarray) -> list[tuple[int, list[int]]]:
        """Return the transfers of a layer, in an order that all ranks share, so that two ranks that exchange experts
        start with the same one."""
        first, end = np.searchsorted(moved[:, 0], (layer, layer + 1))
        depth = self._plan.slots_per_rank
        wanted: dict[tuple[int, int], tuple[int, list[int]]] = {}
        for _, expert, source, slot in moved[first:end].tolist():
            wanted.setdefault((slot // depth, expert), (source, []))[1].append(slot)
        return [copy for _, copy in sorted(wanted.items())]

    def _run(self, move: Move, source: int, slots: list[int]) -> None:
        depth = self._plan.slots_per_rank
        giver, taker, rank = source // depth, slots[0] // depth, self._group.rank
        if rank not in (giver, taker):
            return
        held = self._layers[move.layer].expert_slots
        if rank == giver == taker:
            arrived = [tensor.clone() for tensor in held[source - self._first].tensors()]
        elif rank == giver:
            for tensor in held[source - self._first].tensors():
                self._links.send(tensor, taker, self._config.timeout_s)
            return
        else:
            arrived = [torch.empty_like(tensor) for tensor in held[0].tensors()]
            for tensor in arrived:
                self._links.receive(tensor, giver, self._config.timeout_s)
        for slot in slots:
            move.arrivals[slot - self._first] = arrived

    def _put_in_place(self, move: Move, target: Plan) -> None:
        """Let a layer follow the new plan, after its experts have arrived on all ranks."""
        if self._stream is not None:
            torch.cuda.current_stream(self._group.device).wait_stream(self._stream)
        experts = self._layers[move.layer]
        for slot, arrived in move.arrivals.items():
            for tensor, new in zip(experts.expert_slots[slot].tensors(), arrived, strict=True):
                put_in_place(tensor, new)
        experts.replace(target, move.layer)
        depth = self._plan.slots_per_rank
        remote = sum(source // depth != slots[0] // depth for source, slots in move.copies)
        self._note(
            num_moved=self._update.num_moved + sum(len(slots) for _, slots in move.copies),
            moved_bytes=self._update.moved_bytes + remote * self._expert_bytes,
        )

    def _note(self, **changes: float | bytes) -> None:
        self._update = msgspec.structs.replace(self._update, **changes)


def _shares(load: np.ndarray) -> bytes:
    """Return each part's share of the load, from [layers, parts]."""
    by_part = load.sum(axis=0)
    return bytes((by_part / max(by_part.sum(), 1e-9)).astype("<f4"))


def put_in_place(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Replace a tensor's content. On the CPU the tensor takes over the new one's memory, so no step waits for a copy.
    On a GPU copying is fast, and captured graphs refer to addresses."""
    if tensor.device.type == "cpu":
        tensor.set_(new)  # type: ignore[call-overload]  # missing in the stubs
    else:
        tensor.copy_(new)
