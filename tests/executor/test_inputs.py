"""A step's inputs made on the device, from one copy, are those that the host makes. Here the device is the CPU."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from penstock.executor.batch import Chains, StateBatch
from penstock.executor.cache_layout import CacheLayout
from penstock.executor.protocol import Admission, GroupInfo, Row, Sampling
from penstock.executor.step.inputs import DeviceInputs, HostInputs, PaddedSize
from penstock.executor.step.layout import Layout
from tests.support.refusals import hardest
from tests.support.twins import torch_inputs

CPU = torch.device("cpu")
NUM_SLOTS, LENGTH, BLOCK, NUM_BLOCKS = 6, 50, 4, 90


ONE = CacheLayout()
MANY = CacheLayout(
    groups=(GroupInfo(), GroupInfo("window", 9), GroupInfo("window", 9), GroupInfo("state", pages=3)),
    places=((0, 0), (1, 0), (3, 0), (2, 0)),
)


def device_side(payload: int, layout: CacheLayout = ONE) -> DeviceInputs:
    return DeviceInputs(NUM_SLOTS, LENGTH, BLOCK, 64, torch_inputs, CPU, payload, layout)


def admit(inputs: HostInputs | DeviceInputs, admission: Admission) -> None:
    inputs.admit(admission.slot, np.frombuffer(admission.tokens, np.int32).copy(), admission.sampling)


def admission(slot: int, rng: np.random.Generator) -> Admission:
    tokens = rng.integers(0, 1000, rng.integers(2, LENGTH)).astype("<i4")
    sampling = Sampling(
        temperature=0.5, min_p=0.25, top_p=0.75, top_k=slot, seed=int(rng.integers(0, 2**64, dtype="u8"))
    )
    return Admission(slot=slot, request_id=0, tokens=tokens.tobytes(), num_prompt=len(tokens), sampling=sampling)


def steps(rng: np.random.Generator) -> Iterator[tuple[list[Admission], list[Row]]]:
    """Chunks of any size, skipped writes, new blocks, tokens that were not sampled, drafts in rows of their own; a slot
    changes hands now and then."""
    lengths, computed = [0] * NUM_SLOTS, [0] * NUM_SLOTS
    for _ in range(40):
        admissions: list[Admission] = []
        rows: list[Row] = []
        drafts: list[Row] = []
        for slot in rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist():
            tokens, blocks = (), tuple(rng.integers(1, NUM_BLOCKS, rng.integers(0, 3)).tolist())
            if computed[slot] == lengths[slot]:
                admissions.append(admission(slot, rng))
                lengths[slot], computed[slot] = len(admissions[-1].tokens) // 4, 0
                blocks = tuple(rng.integers(1, NUM_BLOCKS, -(-LENGTH // BLOCK)).tolist())
            elif rng.random() < 0.3 and lengths[slot] < LENGTH - 3:
                tokens = tuple(rng.integers(0, 1000, 2).tolist())
            first_token, lengths[slot] = lengths[slot], lengths[slot] + len(tokens)
            start = computed[slot]
            count = 1 if rng.random() < 0.4 else int(rng.integers(1, lengths[slot] - start + 1))
            computed[slot] += count
            if tokens and computed[slot] == first_token:  # one position, and these behind it
                drafts += [Row(slot, first_token + place, 1, True) for place in range(len(tokens))]
                computed[slot] += len(tokens)
            rows.append(
                Row(
                    slot,
                    start,
                    count,
                    bool(rng.random() < 0.7),
                    first_block=0 if admissions and admissions[-1].slot == slot else int(rng.integers(0, 5)),
                    blocks=blocks,
                    write_from=int(rng.integers(0, start + count + 2)) if rng.random() < 0.3 else 0,
                    first_token=first_token,
                    tokens=tokens,
                )
            )
        yield admissions, rows + drafts


def with_groups(row: Row, rng: np.random.Generator) -> Row:
    """Return the row with new blocks and pages of other groups."""

    def blocks(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, NUM_BLOCKS, count).tolist())

    groups = tuple((int(rng.integers(0, 5)), blocks(int(rng.integers(0, 3)))) for _ in range(2))
    states = [blocks(3) if rng.random() < 0.5 else () for _ in range(2)]
    changed = {"groups": groups if rng.random() < 0.7 else (), "states_in": states[0], "states_out": states[1]}
    return msgspec.structs.replace(row, **changed)


@pytest.mark.parametrize("layout", [ONE, MANY], ids=["one", "many"])
@pytest.mark.parametrize("payload", [7, 1 << 10])
@pytest.mark.parametrize("seed", hardest(range(4), 3))
def test_a_device_makes_of_any_step_what_the_host_makes(seed: int, payload: int, layout: CacheLayout) -> None:
    """With little room in a copy, too: then most of what changed is copied by itself."""
    rng = np.random.default_rng(seed)
    here, there = HostInputs(NUM_SLOTS, LENGTH, BLOCK, layout), device_side(payload, layout)
    for admissions, rows in steps(rng):
        if layout is MANY:  # once for a slot, as in any step
            firsts = {row.slot: index for index, row in reversed([*enumerate(rows)])}
            rows = [with_groups(row, rng) if firsts[row.slot] == index else row for index, row in enumerate(rows)]
        for inputs in (here, there):
            for one in admissions:
                admit(inputs, one)
            inputs.take(rows)
        arranged = Layout(rows)
        wanted = np.flatnonzero(rng.random(arranged.num_tokens) < 0.6)
        (expected, expected_ends), (got, ends) = here.prepare(arranged, wanted), there.prepare(arranged, wanted)
        for own, others in zip(got.by_layer(4), expected.by_layer(4), strict=True):
            for name in expected.__slots__:
                assert_equal(name, getattr(own, name), getattr(others, name), expected.context_lens)
        assert torch.equal(ends.targets, expected_ends.targets)
        for option, other in zip(ends.options, expected_ends.options, strict=True):
            assert option.dtype == other.dtype and torch.equal(option, other)
        *_, top_k, _, _, positions = ends.options
        assert positions.tolist() == arranged.context_lens[arranged.samples].tolist()
        assert top_k.tolist() == arranged.slots[arranged.samples].tolist()
        sampled = torch.from_numpy(rng.integers(0, 1000, len(ends.targets)).astype(np.int32))
        for inputs in (here, there):
            inputs.tokens.view(-1)[ends.targets] = sampled


def assert_equal(name: str, ours: object, theirs: object, contexts: torch.Tensor) -> None:
    if name == "block_tables":  # beyond a row's context anything valid will do
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        used = torch.arange(theirs.shape[1]) < -(-contexts[:, None] // BLOCK)
        assert ours.shape == theirs.shape and torch.equal(ours * used, theirs * used)
        assert int(ours.min()) >= 0 and int(ours.max()) < NUM_BLOCKS
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    elif isinstance(theirs, StateBatch | Chains):
        assert isinstance(ours, type(theirs))
        for field, mine, other in zip(theirs._fields, ours, theirs, strict=True):
            assert_equal(field, mine, other, contexts)
    elif name != "other_groups":  # the views have them
        assert ours == theirs, name


def test_padding_has_no_blocks_in_any_group_and_no_state() -> None:
    inputs = device_side(1 << 10, MANY)
    admit(inputs, admission(0, np.random.default_rng(9)))
    row = Row(0, 0, 1, True, blocks=(7,), groups=((0, (8,)), (0, (9,))), states_in=(4, 5, 6), states_out=(1, 2, 3))
    inputs.take([row])
    inputs.send_padded(Layout([row]), PaddedSize(3, 3, False))
    batch, _ = inputs.compute_padded(PaddedSize(3, 3, False), LENGTH)
    assert [view.kv_cells.tolist() for view in batch.by_layer(4)] == [[slot * BLOCK, 0, 0] for slot in (7, 8, 9, 9)]
    assert batch.states is not None and batch.states.read.tolist() == [[4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert batch.states.write.tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0]] and batch.states.is_new.all()


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_state_pages_of_any_number_of_rows_are_aligned_for_kernels(num_rows: int, has_drafts: bool) -> None:
    """With three pages, the second half of a single row begins twelve bytes into the tensor it is cut from."""
    inputs = device_side(1 << 10, MANY)
    rows = []
    for slot in range(num_rows):
        admit(inputs, admission(slot, np.random.default_rng(slot)))
        drafts = {"first_token": 2, "tokens": (8,)} if has_drafts else {}
        rows.append(Row(slot, 1, 1, True, states_in=(4, 5, 6), states_out=(1, 2, 3), **drafts))  # type: ignore[arg-type]
    if has_drafts:
        rows += [Row(slot, 2, 1, True) for slot in range(num_rows)]
    inputs.take(rows)
    layout = Layout(rows)
    batches = [inputs.prepare(layout, np.arange(layout.num_tokens))[0]]
    size = PaddedSize(len(rows), len(rows), False)
    inputs.send_padded(layout, size)
    batches.append(inputs.compute_padded(size, LENGTH)[0])
    for batch in batches:
        assert batch.states is not None
        for tensor in batch.states:
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
