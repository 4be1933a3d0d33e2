"""Speculative decoding: draft tokens are those that followed the same text earlier in a request, else those of the model's
own draft layer, if it has one and `SpeculativeConfig` asks for it.

Where there are drafts, the step has, beside the row of a request's last token, one row for each draft token. Each row
samples as usual, and `DraftRows.accepted` selects the rows that were computed with the sampled tokens. So drafts change
the cost of a step and the number of tokens it yields, never the tokens. The scheduler calls this.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from typing import NamedTuple

import msgspec

from penstock._csrc import ffi, lib
from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.kv import Kv
from penstock.engine.core.request import Request
from penstock.engine.messages import Stats
from penstock.executor.protocol import Row, Step, StepResult

MARGIN = 1.05  # by which drafts of the layer must be faster than none, so that noise does not decide
PLAIN_STEPS = 3  # measured steps without drafts of the layer, before there are any
PERIOD, TRIAL = 200, 4  # of 200 steps, the last 4 do the opposite of what pays, to measure its cost again
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

    def choose_drafts(
        self, request: Request, num_new: int, sent: DraftRows | None, num_running: int, drafted: Sequence[int] | None
    ) -> None:
        pass

    def note_cost(self, step: Step, num_requests: int, now_s: float) -> None:
        pass


@dataclass(slots=True)
class StepCost:
    """The measured times of steps without prompts, of about equally many requests."""

    plain_s: float = 0.0  # mean of the last ones without drafts of the layer
    drafted_s: float = 0.0  # mean of the last ones that ask for drafts; 0: none yet
    num_plain: int = 0

    def note(self, is_drafted: bool, elapsed_s: float) -> None:
        """Take in a time. Shorter ones count more: whatever else the machine does only makes steps longer."""
        before_s = self.drafted_s if is_drafted else self.plain_s
        weight = 2 if elapsed_s < before_s else 16
        mean_s = before_s + (min(elapsed_s, 2 * before_s) - before_s) / weight if before_s else elapsed_s
        if is_drafted:
            self.drafted_s = mean_s
        else:
            self.plain_s = mean_s
            self.num_plain += 1

    def pays(self, num_accepted: float) -> bool:
        """Tell whether so many accepted drafts a step pay for their cost, as far as it is known."""
        if self.num_plain < PLAIN_STEPS:
            return False
        return not self.drafted_s or (1 + num_accepted) * self.plain_s > MARGIN * self.drafted_s


class Drafter:
    """Decides which requests get drafts, and how many. The state per request is stored in the request.

    `draft_trust` rises with correct predictions of repeated text and falls with wrong ones. Below 1, predictions are only
    compared with the sampled tokens, which costs nothing; each level from 1 on doubles the number of drafts.

    Drafts of the layer cost as much whether they are right or not. `layer_trust` is the mean number of right ones each
    time that the layer drafted: it does so for a request as long as that pays for what steps with its drafts cost.
    """

    def __init__(self, config: SpeculativeConfig, block_size: int, max_rows: int, stats: Stats, kv: Kv) -> None:
        """`max_rows`: maximum number of rows in a step, including those of drafts."""
        self._config, self._block_size, self._max_rows = config, block_size, max_rows
        self._stats, self._kv = stats, kv
        self._most_trust = 1 + (config.most_drafts - 1).bit_length()
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)  # by the bits of the number of requests
        self._num_steps = 0
        self._noted_s = 0.0  # when the last result came …
        self._was_drafted: bool | None = None  # … and the kind of its step, as `_is_drafted` tells

    def choose_drafts(
        self, request: Request, num_new: int, sent: DraftRows | None, num_running: int, drafted: Sequence[int] | None
    ) -> None:
        """Choose the drafts that follow the `num_new` tokens of a row; `sent` are the drafts that the row had, if
        any, and `drafted` those of the layer; None: the row did not ask for any."""
        is_expected, num_accepted = self._follow(request, num_new), num_new - 1
        trust = request.draft_trust
        if request.has_layer_drafts:  # also if none was sent: the layer has run
            request.layer_trust += (num_accepted - request.layer_trust) / 4
        request.awaits_drafts = request.awaits_drafts and drafted is None
        if sent is not None and not request.has_layer_drafts:
            num_sent = len(sent.tokens)
            trust += 1 if num_accepted == num_sent else -1 if 2 * num_accepted < num_sent else 0
        elif is_expected is not None:
            trust += -1 if not is_expected else trust < 1
        request.draft_trust = max(LEAST_TRUST, min(trust, self._most_trust))
        room = min(self._config.max_draft_rows, self._max_rows - num_running)
        # The request's last token is never computed, nor is a stop token.
        room = max(0, min(room, request.max_tokens - request.num_outputs - request.num_pending - 1))
        repeated = self._expected(request, room) if request.draft_trust > 0 else []
        drafts = takewhile(lambda token: token not in request.stop_ids, repeated or (drafted or ())[:room])
        request.drafts = tuple(drafts)
        request.has_layer_drafts = bool(request.drafts) and not repeated
        if drafted is not None and not request.drafts:  # the layer has run in vain
            request.layer_trust -= request.layer_trust / 4

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

    def _expected(self, request: Request, room: int) -> list[int]:
        if request.draft_index < 0:
            return []
        count = min(1 << (request.draft_trust - 1), self._config.most_drafts, room)
        return list(islice(cycle(request.tokens[request.draft_index :][:count]), count))

    def extend(self, planned: dict[Request, Row], budget: int, spare: int) -> tuple[list[Row], dict[int, DraftRows]]:
        """Add drafts to planned rows, within `budget` tokens and `spare` pages.

        Return the rows that follow those of `planned`, and the drafts by the index of the row that they follow.
        """
        eager = [(i, request) for i, (request, row) in enumerate(planned.items()) if request.drafts and row.sample]
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
        if self._config.layer_drafts:
            self._ask(planned, rows, sent, spare)
        self._stats.num_drafts += len(sent)
        self._stats.draft_tokens += len(rows)
        return rows, sent

    def _ask(self, planned: dict[Request, Row], rows: list[Row], sent: dict[int, DraftRows], spare: int) -> None:
        """Ask the layer for the next drafts of the requests for which that pays, as far as there will be room for them. A
        row and its drafts ask alike."""
        self._num_steps += 1
        cost, is_trial = self._costs[len(planned).bit_length()], self._num_steps % PERIOD >= PERIOD - TRIAL
        most, room = self._config.layer_drafts, 0
        if self._kv.num_pages <= spare:
            room = min(self._config.max_draft_rows, self._max_rows - len(planned))
        for index, (request, row) in enumerate(planned.items()):
            repeats = request.draft_trust > 0 and request.draft_index >= 0
            may_ask = row.sample and request.may_draft and not repeats
            if not may_ask or cost.pays(min(request.layer_trust, most)) == is_trial:
                continue
            drafts = sent.get(index, DraftRows(len(planned), ()))
            first, num = drafts.first - len(planned), len(drafts.tokens)
            end = row.start + row.count + num
            # Each but the first needs a position behind those of the row and of its drafts. The last token is never computed.
            positions = len(request.kv.blocks) * self._block_size - end
            left = request.num_prompt + request.max_tokens - end - 2
            count = min(most, 1 + positions, left, room)
            if count <= 0:
                continue
            room -= count
            planned[request] = msgspec.structs.replace(row, drafts=count)
            request.awaits_drafts = True
            rows[first : first + num] = [msgspec.structs.replace(each, drafts=count) for each in rows[first:][:num]]

    def note_cost(self, step: Step, num_requests: int, now_s: float) -> None:
        """Learn from the time since the result of the step before; the rows begin with those of so many requests."""
        elapsed_s, self._noted_s = now_s - self._noted_s, now_s
        before, self._was_drafted = self._was_drafted, self._is_drafted(step, num_requests)
        # Steps are planned while the one before runs, unless that has drafts or asks for some. So a change takes other times.
        if self._was_drafted is not None and self._was_drafted is before:
            self._costs[num_requests.bit_length()].note(before, elapsed_s)

    def _is_drafted(self, step: Step, num_requests: int) -> bool | None:
        """Tell whether a step asks for drafts of the layer; None if its time does not tell what that costs."""
        is_drafted = any(row.drafts for row in step.rows)
        # A step that has drafts and asks for none is neither kind, nor is one with a prompt, before which there may have been
        # nothing to do. A row behind a wrong draft has the right ones again where layers are recurrent.
        has_prompt = step.admissions or any(row.count > 1 + self._config.layer_drafts for row in step.rows)
        return is_drafted if not has_prompt and (is_drafted or len(step.rows) == num_requests) else None


def find_repeat(tokens: "array[int]", least: int, most: int) -> int:
    """Find the longest suffix of `most` down to `least` tokens that occurs earlier in the text, and its last such
    occurrence. Return the index of the token that follows the occurrence, or -1."""
    first = max(0, len(tokens) - WINDOW)
    return int(lib.penstock_find_repeat(ffi.from_buffer("int32_t[]", tokens), len(tokens), first, least, most))
