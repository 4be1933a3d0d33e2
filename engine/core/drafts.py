"""Drafts: tokens that followed the same text earlier in a request are computed before they are sampled.

A request whose last tokens repeat an earlier place of its own gets one row for every draft beside the row of its last
token, all in one step. Each of them samples as ever, and `Sent.taken` keeps those that were computed with what was sampled.
So drafts change what a step costs and how many tokens it brings, never which. The scheduler calls all of it.
"""

from array import array
from itertools import takewhile
from typing import NamedTuple

import msgspec

from penstock._csrc import ffi, lib
from penstock.cache.pool import BlockPool
from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.kv import Kv
from penstock.engine.core.request import Request
from penstock.engine.messages import Stats
from penstock.executor.protocol import Row, StepResult

WINDOW = 1 << 15  # tokens at a request's end that are searched
LEAST_TRUST = -2


class Sent(NamedTuple):
    """The drafts of one row of a step."""

    first: int  # of the rows that compute them, one each
    tokens: tuple[int, ...]

    def taken(self, result: StepResult, index: int) -> list[int]:
        """The rows whose tokens count: the one at `index`, and each draft's whose token the row before it sampled."""
        rows = [index]
        for row, draft in enumerate(self.tokens, self.first):
            # One that fails will fail again, as the row of a last token.
            if result.tokens[rows[-1]] != draft or row in result.errors:
                break
            rows.append(row)
        return rows


class Drafter:
    """Decides which requests get drafts, and how many. What it knows of a request is kept there.

    `draft_trust` says how often expectations came true lately. Below 1 they are only compared with what comes, which
    costs nothing; from there on every level doubles the drafts.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        pool: BlockPool,
        block_size: int,
        max_rows: int,
        stats: Stats,
        kv: Kv,
    ) -> None:
        """`max_rows`: of a step, with drafts and all."""
        self._stats, self._kv = stats, kv
        self._config, self._pool, self._block_size, self._max_rows = config, pool, block_size, max_rows
        self._most_trust = 1 + (config.num_speculative_tokens - 1).bit_length()

    def look(self, request: Request, num_new: int, sent: Sent | None, num_running: int) -> None:
        """`num_new` tokens have come, of a row with drafts perhaps: what may follow them?"""
        is_expected = self._follow(request, num_new)
        trust = request.draft_trust
        if sent is not None:
            num_sent, num_accepted = len(sent.tokens), num_new - 1
            trust += 1 if num_accepted == num_sent else -1 if 2 * num_accepted < num_sent else 0
        elif is_expected is not None:
            trust += -1 if not is_expected else trust < 1
        request.draft_trust = max(LEAST_TRUST, min(trust, self._most_trust))
        room = min(self._config.max_draft_rows, self._max_rows - num_running)
        request.drafts = self._expected(request, room) if request.draft_trust > 0 else ()

    def _follow(self, request: Request, num_new: int) -> bool | None:
        """Find the place where the text is repeated. Whether its new tokens were expected; None: nothing was."""
        tokens, place = request.tokens, request.draft_place
        end = len(tokens)
        is_expected = None
        if place >= 0:
            is_expected = tokens[place : place + num_new] == tokens[end - num_new :]
            request.draft_place = place + num_new
        if not is_expected:
            request.draft_place = find_repeat(tokens, self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return is_expected

    def _expected(self, request: Request, room: int) -> tuple[int, ...]:
        if request.draft_place < 0:
            return ()
        # The last token that a request may have is never computed, nor is one that ends it.
        left = request.max_tokens - request.num_outputs - request.num_pending - 1
        count = min(1 << (request.draft_trust - 1), self._config.num_speculative_tokens, left, room)
        repeated = list(request.tokens[request.draft_place :][: max(0, count)])
        period = len(repeated)
        drafts = [repeated[i % period] for i in range(count)] if repeated else []
        return tuple(takewhile(lambda token: token not in request.stop_ids, drafts))

    def extend(self, planned: dict[Request, Row], budget: int, spare: int) -> tuple[list[Row], dict[int, Sent]]:
        """Give drafts to planned rows, as far as tokens and blocks of this step are left over.

        Returns the rows that come behind those of `planned`, and what was sent, by the index of the row that brings it.
        """
        eager = [
            (index, request) for index, (request, row) in enumerate(planned.items()) if request.drafts and row.sample
        ]
        room = min(self._config.max_draft_rows, self._max_rows - len(planned), budget)
        rows: list[Row] = []
        sent: dict[int, Sent] = {}
        for place, (index, request) in enumerate(eager):
            row, held = planned[request], len(request.blocks) * self._block_size
            drafts = request.drafts[: -(-room // (len(eager) - place))] if row.count == 1 else ()
            num_pages = self._kv.num_pages  # of another state
            if num_pages:
                drafts = drafts[: self._kv.draft_room(request)] if spare >= num_pages else ()
            missing = -(-max(0, row.start + 1 + len(drafts) - held) // self._block_size)
            num_tables = 1 + len(request.others)
            if num_pages + missing * num_tables > spare:
                drafts, missing = drafts[: held - row.start - 1], 0
            request.drafts = drafts
            if not drafts:
                continue
            room -= len(drafts)
            spare -= num_pages + missing * num_tables
            blocks = self._pool.allocate(missing)
            if request.num_sent_blocks == len(request.blocks):  # else an entry has changed since, and is sent again
                request.num_sent_blocks += missing
            request.blocks += blocks
            row = msgspec.structs.replace(row, blocks=(*row.blocks, *blocks), first_token=row.start + 1, tokens=drafts)
            if missing and request.others:
                row = msgspec.structs.replace(row, groups=self._extend_others(request, row, missing))
            if num_pages:
                row = msgspec.structs.replace(row, states_out=self._kv.begin_drafts(request))
            planned[request] = row
            sent[index] = Sent(len(planned) + len(rows), drafts)
            rows += [Row(request.slot, row.start + 1 + i, 1, True) for i in range(len(drafts))]
        self._stats.num_drafts += len(sent)
        self._stats.draft_tokens += len(rows)
        return rows, sent

    def _extend_others(self, request: Request, row: Row, missing: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """As much for the other groups, which are as long as the first when a single position is computed."""
        groups = row.groups or tuple((len(table), ()) for table in request.others)
        extended = []
        for index, (table, (first, given)) in enumerate(zip(request.others, groups, strict=True)):
            assert len(table) + missing == len(request.blocks)
            blocks = self._pool.allocate(missing)
            if request.num_sent_others[index] == len(table):
                request.num_sent_others[index] += missing
            table += blocks
            extended.append((first, (*given, *blocks)))
        return tuple(extended)


def find_repeat(tokens: "array[int]", least: int, most: int) -> int:
    """Of the longest suffix of `most` down to `least` tokens that stands in the text before, the place nearest to the
    end: the index of what followed there. -1: there is none."""
    first = max(0, len(tokens) - WINDOW)
    return int(lib.penstock_find_repeat(ffi.from_buffer("int32_t[]", tokens), len(tokens), first, least, most))
