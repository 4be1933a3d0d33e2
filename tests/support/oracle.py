"""An executor without a model: what it samples depends on every byte of KV it reads, so no cache bug can hide.

The key-value entry it writes at a position is a hash of (model, adapter, token, entry at the previous
position), read back through the block table. The token it samples is a hash of all entries of the context.
A wrong, stale, swapped or foreign block therefore changes the output at once, and the same request gives the
same tokens whatever else runs. Other groups of layers have entries of their own in pages of the same pool: each window
group's weigh as far as the window reaches, and a recurrent state is a hash of all tokens so far in each of its pages. It needs numpy and no torch, and keeps the protocol to the letter: it asserts
what a real executor would silently get wrong.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import xxhash

from penstock.cache.tiers.base import Store
from penstock.executor.protocol import (
    NO_WEIGHTS,
    AdapterError,
    AdapterInfo,
    Admission,
    ExecutorConfig,
    GroupInfo,
    ModelInfo,
    Part,
    Row,
    Sampling,
    SleepLevel,
    Step,
    StepResult,
    TokenLogprobs,
    WeightsError,
)
from penstock.executor.regular_files import read_regular
from penstock.executor.tiers.open_tiers import open_tiers
from penstock.executor.tiers.transfers import NumpyCopier

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 2048


class OracleExecutor:
    """Sizes come from the config (`kv_cache_bytes` counts 8 bytes a position, `hf_overrides` the vocabulary and the groups
    of layers).

    `stores` come before those of the config, so that tests can have faults.
    """

    def __init__(
        self, config: ExecutorConfig, max_in_flight: int = 2, stores: Mapping[str, Store] = MappingProxyType({})
    ) -> None:
        max_model_len = config.max_model_len or MAX_MODEL_LEN
        block_bytes = 8 * config.block_size
        num_blocks = (config.kv_cache_bytes or 2**23) // block_bytes
        vocab_size = int(config.hf_overrides.get("vocab_size", VOCAB_SIZE))
        groups = msgspec.convert(config.hf_overrides.get("groups", [{}]), tuple[GroupInfo, ...])
        model = xxhash.xxh3_64_intdigest(f"oracle {vocab_size} {config.seed}".encode())
        fingerprint = model.to_bytes(8, "little")
        self._kv = np.zeros((num_blocks, config.block_size), dtype=np.uint64)
        blocks = self._kv.view(np.uint8)
        self._tiers = open_tiers(
            config, block_bytes, fingerprint, lambda arena: NumpyCopier(blocks, arena), stores=stores
        )
        self.info = ModelInfo(
            architecture="Oracle",
            dtype="uint64",
            device="cuda" if config.device == "cuda" else "cpu",
            vocab_size=vocab_size,
            hidden_size=4,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            max_in_flight=max_in_flight,
            memory={"KV cache": num_blocks * block_bytes, **self._tiers.memory},
            num_host_blocks=self._tiers.num_host_blocks,
            stores=self._tiers.stores,
            serves_peers=self._tiers.serves_peers,
            groups=groups,
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        self._adapters: set[str] = set()
        self._asleep: set[Part] = set()
        self._windows = [group.window for group in groups if group.kind != "state"]  # 0: none
        self._num_pages = groups[-1].pages
        self._model = model
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens or 2048
        self._transfers = self._tiers.transfers
        self._slots: dict[int, _Slot] = {}
        self._queue: deque[Step] = deque()
        self._masks: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by step; read late, as a real executor may
        self._unmasked: Step | None = None  # submitted, and its masks are still to come
        self._last_step_id = 0
        self._written: set[tuple[int, int]] = set()

    def submit(self, step: Step) -> None:
        assert len(self._queue) < self.info.max_in_flight, "too many steps in flight"
        assert step.step_id > self._last_step_id, "steps out of order"
        assert not self._asleep, "a step for an executor that sleeps"
        self._last_step_id = step.step_id
        assert self._unmasked is None, "a step is submitted before the masks of the one before"
        self._queue.append(step)
        if any(row.masked for row in step.rows):
            self._unmasked = step

    def set_masks(self, step_id: int, rows: np.ndarray, masks: np.ndarray) -> None:
        step, self._unmasked = self._unmasked, None
        assert step is not None and step.step_id == step_id, "masks that no step waits for"
        assert rows.dtype == masks.dtype == np.int32 and masks.flags["C_CONTIGUOUS"]
        assert len(rows) == len(masks) == len(set(rows.tolist()))
        assert all(step.rows[row].masked for row in rows)
        assert len(rows) == 0 or masks.shape[1] * 32 >= self.info.vocab_size
        self._masks[step_id] = rows, masks

    def collect(self) -> StepResult:
        step = self._queue.popleft()
        assert step is not self._unmasked, "a step is collected before its masks came"
        assert sum(row.count for row in step.rows) <= self._max_num_batched_tokens
        assert len(step.rows) <= self._max_num_seqs, "more rows than there is memory for"
        for admission in step.admissions:
            assert 0 <= admission.slot < self._max_num_seqs
            assert admission.adapter is None or not self.info.max_loras or admission.adapter in self._adapters
            self._slots[admission.slot] = _Slot(admission, self._model, self.info.max_model_len, len(self._windows))
        by_slot: dict[int, list[Row]] = {}
        for row in step.rows:
            by_slot.setdefault(row.slot, []).append(row)
        for index, own in by_slot.items():
            self._slots[index].begin(own)
        adapters = {self._slots[index].adapter for index in by_slot} - {None}
        assert not self.info.max_loras or len(adapters) <= self.info.max_loras, "more adapters than there are places"
        self._written.clear()
        self._check_states(step.rows)
        result = StepResult(step.step_id, [-1] * len(step.rows), {}, {}, {}, {}, {})
        rows, masks = self._masks.pop(step.step_id, ((), ()))
        allowed = {int(row): _allowed_ids(mask, self.info.vocab_size) for row, mask in zip(rows, masks, strict=True)}
        # Copies run beside the rows: code that relies on either order must be found out.
        copies_first = step.step_id % 2 == 0
        if self._transfers is not None and copies_first:
            self._transfers.begin(step.transfers)
        for index, row in enumerate(step.rows):
            self._run(self._slots[row.slot], row, index, result, allowed.get(index))
        for index in by_slot:
            self._slots[index].end()
        if self._transfers is None:
            assert step.transfers is None, "there is nowhere to move blocks to"
            return result
        if not copies_first:
            self._transfers.begin(step.transfers)
        return msgspec.structs.replace(result, transfers=self._transfers.end())

    def load_adapter(self, path: str) -> AdapterInfo:
        """Any file that there is in the folder is content."""
        assert not self._queue, "an adapter is loaded while a step runs"
        content = hashlib.sha256()
        try:
            for file in sorted(Path(path).glob("*")):
                content.update(read_regular(file))
        except OSError as error:
            raise AdapterError(f"{error.filename}: {error.strerror}") from None
        self._adapters.add(key := content.hexdigest())
        return AdapterInfo(key, 1, 0)

    def unload_adapter(self, key: str) -> None:
        self._adapters.remove(key)

    def update_weights(self, path: str) -> None:
        """Any file that there is in the folder is content; without one, there are no weights."""
        assert not self._queue, "weights change beneath a step"
        files = sorted(Path(path).glob("*"))
        if not files:
            raise WeightsError(f"{path}: no weights")
        self._model = xxhash.xxh3_64_intdigest(b"".join(map(read_regular, files)))
        fingerprint = self._model.to_bytes(8, "little")
        self.info = msgspec.structs.replace(self.info, fingerprint=fingerprint)
        self._slots.clear()
        self._asleep.discard("weights")

    def sleep(self, level: SleepLevel) -> None:
        assert not self._queue, "memory goes beneath a step"
        self._kv[:] = 0xDEAD
        self._slots.clear()
        self._asleep = {"kv_cache"} if level == 1 else {"kv_cache", "weights"}

    def wake(self, parts: Sequence[Part]) -> None:
        if "kv_cache" in parts and "weights" in self._asleep:
            raise WeightsError(NO_WEIGHTS)
        self._asleep -= {*parts} - {"weights"}

    def fileno(self) -> int | None:
        return None

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._queue.clear()
        self._tiers.close()

    def _run(self, slot: "_Slot", row: Row, index: int, result: StepResult, allowed: list[int] | None = None) -> None:
        end = row.start + row.count
        for group, (first, blocks) in enumerate(((row.first_block, row.blocks), *row.groups)):
            if blocks:
                table = slot.tables[group]
                assert first <= len(table) or self._windows[group], "a gap in a block table"
                slot.tables[group] = table[:first] + [0] * (first - len(table)) + list(blocks)
        if row.tokens:
            assert row.first_token == len(slot.tokens), "tokens that do not continue the history"
            slot.tokens += row.tokens
        assert row.count > 0 and end <= len(slot.tokens), "a position without a token"
        assert end <= min(map(len, slot.tables)) * self.info.block_size, "a position without a block"
        for group in range(len(slot.tables)):
            self._write(slot, row, group)
        self._write_state(slot, row)
        if row.sample:
            assert slot.drafts or end == len(slot.tokens), "a token is sampled twice"
            token = self._sample(slot, end, allowed)
            slot.sampled.append(token)
            result.tokens[index] = token
            if row.drafts:
                self._draft(slot, row, index, result)
            if slot.sampling.logprobs is not None:
                result.logprobs[index] = self._logprobs(token, slot.sampling.logprobs)
        if slot.sampling.prompt_logprobs is not None:
            positions = range(row.start + 1, min(end + 1, slot.num_prompt))
            wanted = slot.sampling.prompt_logprobs
            result.prompt_logprobs[index] = [self._logprobs(slot.tokens[p], wanted) for p in positions]
        if slot.pooling is not None and end == slot.num_prompt:
            digest = self._context_hash(slot, end)
            result.embeddings[index] = np.array(
                [digest >> shift & 0xFFFF for shift in (0, 16, 32, 48)], "<f4"
            ).tobytes()

    def _write(self, slot: "_Slot", row: Row, group: int) -> None:
        size, table = self.info.block_size, slot.tables[group]
        previous = slot.root ^ group
        if row.start > 0:
            before = row.start - 1
            previous = int(self._kv[self._page(table, before // size), before % size])
        for position in range(row.start, row.start + row.count):
            previous = xxhash.xxh3_64_intdigest(slot.tokens[position].to_bytes(4, "little"), previous)
            if position >= row.write_from:
                place = self._page(table, position // size), position % size
                # A real executor writes the whole step at once: the order of two writes would be chance.
                assert place not in self._written, f"block {place} is written twice in one step"
                self._written.add(place)
                self._kv[place] = previous

    def _page(self, table: list[int], index: int) -> int:
        assert table[index], "block 0 was handed out, or one that has been given back is read"
        return table[index]

    def _check_states(self, rows: Sequence[Row]) -> None:
        """Take in the rows' pages. No other slot may touch the pages that a slot's rows write: the order would be chance."""
        if not self._num_pages:
            return
        touched: dict[int, int] = {}
        for row in rows:
            slot = self._slots[row.slot]
            slot.states_in, slot.states_out = row.states_in or slot.states_in, row.states_out or slot.states_out
        slots = {row.slot: self._slots[row.slot] for row in rows}.values()
        for slot in slots:
            assert len(slot.states_in) == len(slot.states_out) == self._num_pages and 0 not in slot.states_out
            for page in {*slot.states_in, *slot.states_out}:
                touched[page] = touched.get(page, 0) + 1
        for slot in slots:
            assert all(touched[page] == 1 for page in slot.states_out), "a state is written twice"

    def _write_state(self, slot: "_Slot", row: Row) -> None:
        """Every page has a chain of its own over all tokens so far. A draft's row goes on where the row before it ended."""
        sources = slot.states_out if slot.drafts and row.start >= slot.first_draft else slot.states_in
        for number, (source, target) in enumerate(zip(sources, slot.states_out, strict=True)):
            state = int(self._kv[source, 0]) if row.start else xxhash.xxh3_64_intdigest(b"state", slot.root ^ number)
            for position in range(row.start, row.start + row.count):
                state = xxhash.xxh3_64_intdigest(slot.tokens[position].to_bytes(4, "little"), state)
            self._kv[target] = state

    def _context_hash(self, slot: "_Slot", end: int) -> int:
        digest = 0
        for window, table in zip(self._windows, slot.tables, strict=True):
            first = max(0, end - window) if window else 0
            begin = first // self.info.block_size
            pages = [self._page(table, index) for index in range(begin, -(-end // self.info.block_size))]
            entries = self._kv[pages].reshape(-1)[first - begin * self.info.block_size :][: end - first]
            digest = xxhash.xxh3_64_intdigest(entries.tobytes(), digest)
        if self._num_pages:
            digest = xxhash.xxh3_64_intdigest(self._kv[list(slot.states_out), 0].tobytes(), digest)
        return digest

    def _sample(self, slot: "_Slot", end: int, allowed: list[int] | None) -> int:
        sampling = slot.sampling
        seed = sampling.seed if sampling.temperature > 0 else 0
        choices: Sequence[int] = sampling.allowed_ids or range(self.info.vocab_size)
        if allowed is not None:
            too_short = end - slot.num_prompt < sampling.min_tokens
            banned = {*sampling.banned_ids, *(sampling.stop_ids if too_short else ())}
            choices = [token for token in allowed if token in choices and token not in banned]
            assert choices, "a mask leaves nothing to choose from"
        return choices[(self._context_hash(slot, end) ^ seed) % len(choices)]

    def _draft(self, slot: "_Slot", row: Row, index: int, result: StepResult) -> None:
        """Draft tokens that are right as often as chance has it: always if only one is allowed."""
        end = row.start + row.count
        assert end + row.drafts - 1 <= len(slot.tables[0]) * self.info.block_size, "a draft without a block"
        choices, digest = slot.sampling.allowed_ids or range(self.info.vocab_size), self._context_hash(slot, end)
        result.drafts[index] = [choices[(digest >> 8 * number) % len(choices)] for number in range(1, row.drafts + 1)]

    def _logprobs(self, token: int, num: int) -> TokenLogprobs:
        """Made up, but well-formed: the chosen token is the most likely one."""
        vocab_size = self.info.vocab_size
        ids = (token, *((token + i) % vocab_size for i in range(vocab_size if num < 0 else num)))
        return TokenLogprobs(ids, tuple(-0.5 - max(i - 1, 0) for i in range(len(ids))), 1)


def content_folder(parent: Path, content: str) -> str:
    """Write a folder that is an adapter, or weights, of this content, and return its path."""
    path = parent / content
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(content)
    return str(path)


def _allowed_ids(mask: np.ndarray, vocab_size: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]).tolist()


class _Slot:
    """The state of the request in one slot."""

    def __init__(self, admission: Admission, model: int, max_model_len: int, num_tables: int) -> None:
        self.tokens: list[int] = np.frombuffer(admission.tokens, dtype="<i4").tolist()
        assert 0 < admission.num_prompt <= len(self.tokens) <= max_model_len
        self.num_prompt = admission.num_prompt
        self.sampling: Sampling = admission.sampling
        self.pooling, self.adapter = admission.pooling, admission.adapter
        self.root = xxhash.xxh3_64_intdigest(f"adapter {admission.adapter}".encode(), model)
        self.tables: list[list[int]] = [[] for _ in range(num_tables)]  # of each attention group
        self.states_in: tuple[int, ...] = ()
        self.states_out: tuple[int, ...] = ()
        self.first_draft = 0  # the position of the first …
        self.drafts: list[int] = []  # … that a step computes …
        self.sampled: list[int] = []  # … and what it samples

    def begin(self, rows: list[Row]) -> None:
        """Take in the slot's rows of a step; forget the wrong drafts of the last step."""
        first, *others = rows
        if self.sampled:
            num_right = first.start - (len(self.tokens) - len(self.sampled))
            if self.states_out and self.drafts and num_right == -1:
                num_right = 0  # it goes back to the state before
            else:
                assert 0 <= num_right <= len(self.drafts), "a row does not go on where the last step ended"
                assert not self.states_out or num_right == len(self.drafts), "a state has passed a wrong draft"
            assert self.sampled[:num_right] == self.drafts[:num_right], "a wrong draft counts as computed"
            del self.tokens[first.start + 1 :]
        self.drafts, self.sampled = [], []
        if others:
            assert first.sample and first.count == 1 and first.first_token == first.start + 1
            expected = Row(first.slot, first.first_token, 1, True, drafts=first.drafts)
            assert others == [
                msgspec.structs.replace(expected, start=first.first_token + i) for i in range(len(first.tokens))
            ]
            self.drafts += first.tokens
            self.first_draft = first.first_token

    def end(self) -> None:
        """Not before all rows have run: until then the drafts stand in the history."""
        if self.sampled:
            self.tokens[len(self.tokens) - len(self.drafts) :] = self.sampled
