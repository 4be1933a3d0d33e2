"""How kernels are launched: what chooses a variant, and what is refused; the interpreter stands in for the compiler. How many launches
a layer of a decoding step is: at few rows they, not bytes, are what a step takes. They are counted as what a third layer adds to
two; a graph replays exactly these.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from benchmarks.gpu import cases
from benchmarks.gpu.batches import make_batch
from benchmarks.gpu.shapes import config_of
from benchmarks.gpu.switch_part import CODES, FP8, PLAIN, comparisons, switched
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from penstock.executor.kernels.cuda import tiles
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.support import cards
from tests.support.checkpoints import compute_with
from tests.support.kernel_cases import triton_kernels
from tests.support.pretended_ops import EMPTY
from tests.support.programs import printed_by
from tests.support.refusals import cases as read_cases
from tests.support.refusals import hardest_rows
from tests.support.variants import variants

CASES: list[tuple[str, dict[str, Any], int]] = read_cases(__file__, "launches of a layer", PLAIN=PLAIN, CODES=CODES)
LONGEST = 512
FP8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


@contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names of all kernels and operations that a GPU would run, in order: views and allocations launch nothing."""
    mode = _Launches()

    def run(kernel: InterpretedFunction, *arguments: Any, **options: Any) -> None:
        """Kernels are not interpreted, which takes minutes: what they would write decides no launch."""
        mode.names.append(kernel.fn.__name__)

    with mock.patch.object(InterpretedFunction, "run", run), mode:
        yield mode.names


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what `reshape` or `linear` is made of shows whether it copies
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if _computes(func, args, kwargs, out):
            self.names.append(func.overloadpacket.__name__)
        return out


def _computes(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    if func._schema.is_mutable:
        return True
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
    is_new = any(tensor.untyped_storage().data_ptr() not in given for tensor in _tensors(out) if tensor.numel())
    return is_new and func.overloadpacket not in EMPTY


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize(("name", "options", "most"), hardest_rows(CASES, CASES[-1:]))
def test_a_layer_of_a_decoding_step_has_few_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: dict[str, Any], most: int
) -> None:
    compute_with(monkeypatch, OPS)
    name, _, is_quantized = name.partition(" ")
    config = config_of(name, True) | (FP8 | FP8_SIZES if is_quantized else {})
    with switched(options):
        counts = [count(tmp_path, config | {"num_hidden_layers": layers}) for layers in (2, 3)]
    layer = counts[1] - counts[0]
    assert layer.total() == most, layer


def test_switches_that_a_gpu_compares_are_off() -> None:
    sides = [side for each in comparisons() for side in each.switches.values()]
    for name, value in [switch for side in sides for switch in side.items()]:
        before = resolve_name(f"penstock.executor.kernels.cuda.{name}")
        with switched({name: value}):
            assert before != resolve_name(f"penstock.executor.kernels.cuda.{name}") == value


@pytest.mark.parametrize(
    ("options", "build", "shape", "expected"), read_cases(__file__, "launches", cases=cases, partial=partial)
)
def test_a_call_has_no_more_launches_than_it_needs(
    options: dict[str, Any], build: Any, shape: tuple[Any, ...], expected: str
) -> None:
    kit = cases.Kit(torch.device("cpu"), torch.bfloat16, is_empty=True)
    case, *_ = build(kit, "", *shape)
    with switched(options), launches() as names:
        case.call(triton_kernels(kit.device))
    assert names == expected.split()


def test_tiles_are_those_that_fit_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, card, arguments, expected in read_cases(__file__, "tiles", **vars(cards)):
        monkeypatch.setattr("penstock.executor.kernels.card._WITHOUT_GPU", card)
        assert getattr(tiles, name)(*arguments) == expected, (name, card, arguments)


def count(folder: Path, config: dict[str, Any]) -> Counter[str]:
    """Count the launches of a step whose rows may have long contexts, as far as is known when a graph is captured."""
    (folder / "config.json").write_text(json.dumps(config))
    runner = UniprocExecutor(
        ExecutorConfig(model=str(folder), device="cpu", dtype="bfloat16", load_format="dummy", kv_cache_bytes=2**20)
    )._rank.runner
    batch = make_batch([(1, 4), (1, 21)], torch.device("cpu"), LONGEST)
    with torch.inference_mode(), launches() as names:
        runner._model.forward(batch, runner._pages)
    return Counter(names)


@kernel
def _scale(x_ptr, y_ptr, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < count)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.ones(64, device=device)


def test_only_constants_dtypes_and_options_make_another_variant(x: torch.Tensor) -> None:
    """Neither a number that is one or divisible by sixteen, nor how wide a pointer is aligned."""
    y = torch.zeros_like(x)
    _scale[(1,)](x, y, 64, 2.0, BLOCK=64)
    seen = len(variants())
    for count, factor in ((1, 3.0), (16, 4.0), (5, 1.0)):
        _scale[(1,)](x[4:], y[8:], count, factor, BLOCK=64)
        assert y[8 : 8 + count].tolist() == [factor] * count
    _scale[(2, 1)](x, y, 3, 5.0, BLOCK=64)
    assert len(variants()) == seen
    for options in ({"BLOCK": 16}, {"BLOCK": 64, "num_warps": 8}):
        _scale[(1,)](x, y, 64, 2.0, **options)
    _scale[(1,)](x, y.half(), 64, 2.0, BLOCK=64)
    new = variants()[seen:]
    assert [variant.options for variant in new] == [{"BLOCK": 16}, {"BLOCK": 64, "num_warps": 8}, {"BLOCK": 64}]
    assert new[-1].kernel == "_scale" and new[-1].dtypes == (torch.float32, torch.float16)


@pytest.mark.parametrize(("arguments", "message"), read_cases(__file__, "refused launches"))
def test_a_launch_of_another_variant_is_refused(x: torch.Tensor, arguments: tuple[Any, ...], message: str) -> None:
    """The first two arguments are where the tensors begin in `x`."""
    first, second, *rest = arguments
    with pytest.raises(AssertionError, match=f"_scale: {message}"):
        _scale[(1,)](x[first:], x[second:], *rest, BLOCK=32)


@pytest.mark.slow
def test_a_variant_is_searched_once_and_each_launch_passes_its_arguments(request: pytest.FixtureRequest) -> None:
    """Eight launches of three variants reach an idle driver. The search is most of a launch's time on the host."""
    cache = str(request.config.cache.mkdir("triton"))
    text = printed_by("-m", "tests.support.idle_gpu", timeout_s=600, TRITON_CACHE_DIR=cache)
    *launches, counts = map(json.loads, text.splitlines())
    assert len(launches) == 8
    for launch in launches:
        assert launch["received"] == launch["sent"]
    assert counts == {"searched": 3, "loaded": 3}


@pytest.mark.slow
def test_a_start_finds_the_kernels_that_were_compiled_without_a_gpu(tmp_path: Path) -> None:
    """Through the ordinary launch; a planted difference shows that another one would be compiled."""
    for program in ("deploy.compile_kernels", "tests.support.idle_gpu"):
        text = printed_by("-m", program, "qwen3-0.6b", timeout_s=900, TRITON_CACHE_DIR=str(tmp_path))
    result = json.loads(text)
    assert result["loaded"] == result["variants"] > 20
    assert result["added"] == [0, 1, 1]
