"""Speculative decoding with n-grams: draft tokens are those that followed the same text earlier in a request.

If the last tokens of a request occur earlier in it, the step has, beside the row of its last token, one row for each
draft token. Each row samples as usual, and `DraftRows.accepted` selects the rows that were computed with the sampled tokens.
So drafts change the cost of a step and the number of tokens it yields, never the tokens. The scheduler calls this.
"""

from array import array
from itertools import takewhile
from typing import NamedTuple

from penstock._csrc import ffi, lib
from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.kv import Kv
from penstock.engine.core.request import Request
from penstock.engine.messages import Stats
from penstock.executor.protocol import Row, StepResult

WINDOW = 1 << 15  # tokens at a request's end that are searched
LEAST_TRUST = -2


class DraftRows(NamedTuple):
    """The drafts of one row of a step."""

    first: int  # index of the row of the first draft; each draft has a row
    tokens: tuple[int, ...]

    def accepted(self, result: StepResult, index: int) -> list[int]:
        """Return the rows whose tokens are valid: the row `index`, and that of each draft that the previous row
        sampled."""
        rows = [index]
        for row, draft in enumerate(self.tokens, self.first):
            # If the row of a draft failed, it fails again as the row of the last token, which reports the error.
            if result.tokens[rows[-1]] != draft or row in result.errors:
                break
            rows.append(row)
        return rows


class NoDrafter:
    """Sends no drafts."""

    def extend(self, planned: dict[Request, Row], budget: int, spare: int) -> tuple[list[Row], dict[int, DraftRows]]:  # noqa: ARG002
        return [], {}

    def choose_drafts(self, request: Request, num_new: int, sent: DraftRows | None, num_running: int) -> None:
        pass


class Drafter(NoDrafter):
    """Decides which requests get drafts, and how many. The state per request is stored in the request.

    `draft_trust` rises with correct predictions and falls with wrong ones. Below 1, predictions are only compared with
    the sampled tokens, which costs nothing; each level from 1 on doubles the number of drafts.
    """

    def __init__(self, config: SpeculativeConfig, block_size: int, max_rows: int, stats: Stats, kv: Kv) -> None:
        """`max_rows`: maximum number of rows in a step, including those of drafts."""
        self._config, self._block_size, self._max_rows = config, block_size, max_rows
        self._stats, self._kv = stats, kv
        self._most_trust = 1 + (config.num_speculative_tokens - 1).bit_length()

    def choose_drafts(self, request: Request, num_new: int, sent: DraftRows | None, num_running: int) -> None:
        """Choose the drafts that follow the `num_new` tokens of a row; `sent` are the drafts that the row had, if
        any."""
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
        """Track the earlier occurrence of the text; return whether it predicted the new tokens, None if it predicted
        nothing."""
        tokens, place = request.tokens, request.draft_index
        end = len(tokens)
        is_expected = None
        if place >= 0:
            is_expected = tokens[place : place + num_new] == tokens[end - num_new :]
            request.draft_index = place + num_new
        if not is_expected:
            request.draft_index = find_repeat(tokens, self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return is_expected

    def _expected(self, request: Request, room: int) -> tuple[int, ...]:
        if request.draft_index < 0:
            return ()
        # The request's last token is never computed, nor is a stop token.
        left = request.max_tokens - request.num_outputs - request.num_pending - 1
        count = min(1 << (request.draft_trust - 1), self._config.num_speculative_tokens, left, room)
        repeated = list(request.tokens[request.draft_index :][: max(0, count)])
        period = len(repeated)
        drafts = [repeated[i % period] for i in range(count)] if repeated else []
        return tuple(takewhile(lambda token: token not in request.stop_ids, drafts))

    def extend(self, planned: dict[Request, Row], budget: int, spare: int) -> tuple[list[Row], dict[int, DraftRows]]:
        """Add drafts to planned rows, within `budget` tokens and `spare` pages.

        Return the rows that follow those of `planned`, and the drafts by the index of the row that they follow.
        """
        eager = [
            (index, request) for index, (request, row) in enumerate(planned.items()) if request.drafts and row.sample
        ]
        room = min(self._config.max_draft_rows, self._max_rows - len(planned), budget)
        rows: list[Row] = []
        sent: dict[int, DraftRows] = {}
        for place, (index, request) in enumerate(eager):
            row = planned[request]
            drafts = request.drafts[: -(-room // (len(eager) - place))] if row.count == 1 else ()
            drafts = drafts[: self._kv.draft_room(request, spare)]
            first = row.start + 1
            pages = self._kv.num_pages + self._kv.num_missing(request, first + len(drafts))
            if pages > spare:  # allocate no block for drafts alone
                drafts = drafts[: len(request.kv.blocks) * self._block_size - first]
                pages = self._kv.num_pages
            request.drafts = drafts
            if not drafts:
                continue
            room -= len(drafts)
            spare -= pages
            planned[request] = self._kv.extend_for_drafts(request, row, drafts)
            sent[index] = DraftRows(len(planned) + len(rows), drafts)
            rows += [Row(request.slot, first + i, 1, True) for i in range(len(drafts))]
        self._stats.num_drafts += len(sent)
        self._stats.draft_tokens += len(rows)
        return rows, sent


def find_repeat(tokens: "array[int]", least: int, most: int) -> int:
    """Find the longest suffix of `most` down to `least` tokens that occurs earlier in the text, and its last such
    occurrence. Return the index of the token that follows the occurrence, or -1."""
    first = max(0, len(tokens) - WINDOW)
    return int(lib.penstock_find_repeat(ffi.from_buffer("int32_t[]", tokens), len(tokens), first, least, most))
