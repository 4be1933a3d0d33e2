"""Every operation of a model against its plain-torch twin: the C kernels at every instruction level that this CPU has, and
the Triton kernels, interpreted and on a GPU.

The calls are functions of benchmarks/gpu/cases.py, and cases.txt has their shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.gpu import cases
from benchmarks.gpu.batches import PAGE
from benchmarks.gpu.cases import TWINS, Case, Kernels, Kit

from penstock.executor.kernels import cpu_ops
from tests.executor.kernels.conftest import HAS_TRITON
from tests.support import refusals
from tests.support.kernel_cases import TOLERANCE, check, triton_kernels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALL = (F32, F16, BF16)
IN_TRITON = [
    pytest.param("interpreter", marks=pytest.mark.skipif(not HAS_TRITON, reason="no triton here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SHARED = dict(refusals.cases(__file__, "shared parts of lines"))
CODES = dict(refusals.cases(__file__, "codes", torch=torch))


class Line(NamedTuple):
    """A call, in which dtypes `make test` interprets it, and in which ones the slow suite does."""

    build: Callable[..., Iterator[Case]]
    shape: tuple[Any, ...]
    fast: tuple[torch.dtype, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ALL
    page: int = PAGE


def lines(*sections: str) -> Iterator[tuple[str, Line]]:
    """Yield a name and a line for each of the sections, whose entries are lines or lists of lines."""
    for section in sections:
        entries = refusals.cases(__file__, section, **(vars(cases) | globals() | SHARED | {"partial": partial}))
        for line in (line for entry in entries for line in (entry if isinstance(entry, list) else [entry])):
            yield f"{line.build.__name__} {', '.join(map(text_of, line.shape))}"[:60], line


def text_of(value: Any) -> str:
    """Return the text of a size or of a function, which is the same in every process."""
    if isinstance(value, partial):
        return " ".join([value.func.__name__, *map(str, value.args), *map(str, value.keywords.values())])
    return str(getattr(value, "__name__", value))


def every_line(in_c: Sequence[str], in_triton: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize with lines of the sections that C computes, and of those that Triton computes."""
    params = []
    for dtype in ALL:
        for name, line in lines(*in_c):
            if dtype in line.dtypes and dtype in cpu_ops.DTYPES:
                params += [pytest.param(level, dtype, line, id=f"{level}-{dtype}-{name}") for level in cpu_ops.levels()]
        for name, line in lines(*in_triton):
            if dtype in line.dtypes:
                slow = () if dtype in line.fast else (pytest.mark.slow_in_interpreter,)
                for kind in IN_TRITON:
                    marks = (*kind.marks, *(slow if kind.values[0] == "interpreter" else ()))
                    params.append(
                        pytest.param(*kind.values, dtype, line, marks=marks, id=f"{kind.values[0]}-{dtype}-{name}")
                    )
    return pytest.mark.parametrize(("kind", "dtype", "line"), params)


def open_kernels(kind: str, dtype: torch.dtype) -> tuple[Kernels, torch.device]:
    """Return kernels that are `kind`: in C at this instruction level, or in Triton, interpreted or on a GPU."""
    device = torch.device("cuda" if kind == "cuda" else "cpu")
    if kind in ("interpreter", "cuda"):
        return triton_kernels(device), device
    return TWINS._replace(ops=cpu_ops.make_ops(dtype, 64, 2, kind), wide_dtype=None), device


@every_line(
    ("operations of C and of Triton", "operations of C"), ("operations of C and of Triton", "operations of Triton")
)
def test_operations_equal_the_twin(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, line: Line) -> None:
    if HAS_TRITON:
        # Codes of 600 rows are dequantized in four pieces, the last of which has few columns.
        monkeypatch.setattr("penstock.executor.kernels.cuda.linear_products.PIECE_BYTES", 64 * 384 * 4)
        # Latents are expanded in pieces: all heads of a row or two, or some heads of one row.
        monkeypatch.setattr("penstock.executor.kernels.cuda.expanded.PIECE_ELEMENTS", 13_000)
    kernels, device = open_kernels(kind, dtype)
    check(kernels, Kit(device, dtype, page=line.page), TOLERANCE, line.build, *line.shape)


@every_line((), ("products of few rows by codes",))
def test_few_rows_by_codes_equal_the_twin(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, line: Line
) -> None:
    monkeypatch.setattr("penstock.executor.kernels.cuda.few_rows.TAKES_CODES", True)
    kernels, device = open_kernels(kind, dtype)
    check(kernels, Kit(device, dtype), TOLERANCE, line.build, *line.shape)


@every_line(
    ("recurrent layers of C and of Triton", "recurrent layers of C"),
    ("recurrent layers of C and of Triton", "recurrent layers of Triton"),
)
def test_a_recurrent_layer_and_its_states_equal_the_twin(kind: str, dtype: torch.dtype, line: Line) -> None:
    kernels, device = open_kernels(kind, dtype)
    factor = 1 if kind in ("interpreter", "cuda") else 0.5
    tolerance = {F32: 2e-4 * factor, F16: 1e-2, BF16: 6e-2 * factor}
    check(kernels, Kit(device, dtype), tolerance, line.build, *line.shape)


@pytest.mark.parametrize("kind", [*cpu_ops.levels(), *IN_TRITON])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_activations_reach_their_limits_without_overflow(kind: str, dtype: torch.dtype) -> None:
    kernels, device = open_kernels(kind, dtype)
    gate = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, float("nan")]], dtype=dtype, device=device)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    for activation in ("silu", "gelu_tanh"):
        y = kernels.ops.gate(gate_up, activation)[0]
        assert torch.equal(y[3:7], gate[0, 3:7])
        assert y[:3].abs().max() < 1e-30
        assert y[7].isnan()
    bounded = kernels.ops.gate(gate_up, "clamped_swish")[0]
    assert bounded[4:7].sub(14).abs().max() < 1e-3 and bounded[:3].abs().max() < 1e-30 and bounded[7].isnan()
