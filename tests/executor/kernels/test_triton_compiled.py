"""Every kernel as the launchers launch it for models people serve, compiled for five kinds of GPU: what the interpreter
cannot see.

No GPU is needed. Compiled code is kept in pytest's cache, by the source's and the compiler's digest. A kernel is compiled
for all models and Hopper by the slow suite, for every card by `make nightly`, and for one model and Hopper, in a minute,
with `-m nightly -k quick`.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import cards

pytestmark = pytest.mark.timeout(3600)
HERE = Path(__file__).parent
# Two processes, each with what it compiles; some 190 kernels for each card in all, a few seconds each.
OTHERS = ["few", "A100", "L40S", "B200", "RTX_PRO"]
JOBS = {
    "quick": [["quick", "H200"]],
    "hopper": [["all", "H200"], OTHERS],
    "everywhere": [["all", "H200", "A100", "L40S"], ["all", "B200", "RTX_PRO"]],
}
MARKS = {"quick": pytest.mark.nightly, "hopper": pytest.mark.slow, "everywhere": pytest.mark.nightly}
PARTS = [pytest.param(name, marks=MARKS[name]) for name in JOBS]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=PARTS)
def reported(request: pytest.FixtureRequest) -> Found:
    """All that aot.py says."""
    jobs = JOBS[request.param]
    with ThreadPoolExecutor(len(jobs)) as pool:
        lines = pool.map(partial(run, str(request.config.cache.mkdir("triton"))), jobs)
    return [line for part in lines for line in part]


def run(cache: str, job: list[str]) -> Found:
    root = HERE.parents[2]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(root / "tests/support/aot.py"), *job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def everywhere(reported: Found) -> Found:
    """What was compiled, for whichever card."""
    return [line for line in reported if "kernel" in line]


@pytest.fixture(scope="module")
def compiled(everywhere: Found) -> Found:
    """For the card that kernels are written for."""
    return [kernel for kernel in everywhere if kernel["card"] == "H200"]


def test_every_kernel_compiles_for_every_card_that_has_what_it_needs(
    reported: Found, request: pytest.FixtureRequest
) -> None:
    failed = [line for line in reported if "error" in line]
    assert not failed, failed
    (jobs,) = (JOBS[name] for name in JOBS if f"[{name}]" in request.node.name)
    assert {line["card"] for line in reported} == {card for _, *names in jobs for card in names}
    lacking = {(line["card"], line["lacking"]) for line in reported if "lacking" in line}
    eight, dependent = "numbers of eight bits", "launches before the last kernel's end"
    assert lacking <= {("A100", eight), ("A100", dependent), ("L40S", dependent)}


def test_nothing_spills_and_shared_memory_suffices(everywhere: Found) -> None:
    wrong = [
        kernel
        for kernel in everywhere
        if kernel["stack"] or kernel["LDL"] or kernel["STL"] or kernel["shared"] > limit(kernel["card"])
    ]
    assert everywhere and not wrong, wrong


def limit(card: str) -> int:
    shared_bytes: int = getattr(cards, card).shared_bytes
    return shared_bytes


def test_rows_are_read_and_written_sixteen_bytes_at_a_time(everywhere: Found) -> None:
    """A stride that might be anything would make it two bytes: wide accesses need it among the constants."""
    seen = {kernel["kernel"] for kernel in everywhere}
    wide = {"_norm", "_gate_rows", "_copy_blocks"}
    assert wide <= seen
    for kernel in everywhere:
        if kernel["kernel"] in (*wide, "_rope_and_store", "_latent_rope", "dequantize_piece"):
            assert kernel["wide_loads"] >= 2 and kernel["wide_stores"] >= 1, kernel
        if kernel["kernel"] in ("_norm", "_gate_rows", "_rope_and_store") and "eight" not in kernel["case"]:
            assert kernel["narrow"] == 0, kernel


def test_products_read_ahead_and_wide(everywhere: Found) -> None:
    """The weight and x of later steps are on their way while a step is computed, sixteen bytes at a time."""
    products = [each for each in everywhere if each["kernel"] == "_multiply" and "float32" not in each["case"]]
    assert products
    for kernel in products:
        assert kernel["in_flight"] > 0, kernel
        assert kernel["wide_loads"] > 0 or "fixed" in kernel["case"] or kernel["card"] != "H200", kernel


def test_kernels_that_start_early_touch_nothing_before_their_turn(compiled: Found) -> None:
    early = [kernel for kernel in compiled if kernel["is_dependent"]]
    assert {"_decode", "_rope_and_store", "_norm", "_gate_rows", "_few_rows"} <= {kernel["kernel"] for kernel in early}
    for kernel in compiled:
        expected = (1, 1, 0) if kernel["is_dependent"] else (0, 0, None)
        assert (kernel["waits"], kernel["launches"], kernel["early"]) == expected, kernel
        assert kernel["is_dependent"] == ("dependent" in kernel["case"]), kernel


def test_only_weights_that_fit_into_the_cache_are_prefetched(compiled: Found) -> None:
    few = [each for each in compiled if each["kernel"] == "_few_rows" and each["is_dependent"]]
    assert few and all((each["prefetches"] == 0) == ("every size" in each["case"]) for each in few), few


def test_what_is_narrowed_to_eight_bits_keeps_nan(everywhere: Found) -> None:
    """A GPU's plain minimum and maximum drop NaN, which would become -448. The interpreter's keep it."""
    narrowing = [kernel for kernel in everywhere if kernel["narrows"]]
    assert "_rope_and_store" in {kernel["kernel"] for kernel in narrowing}
    for kernel in narrowing:
        assert kernel["keeps_nan"] > 0, kernel


def test_pages_are_copied_asynchronously_and_ahead(everywhere: Found) -> None:
    """Where a tile has three stages, keys and values of the next block are on their way while a block is computed,
    although the numbers of their pages have to be read first. Tiles that would spill or fill shared memory have two."""
    kernels = [
        kernel
        for kernel in everywhere
        if kernel["kernel"] in ("_decode", "_prefill") and "float32" not in kernel["case"]
    ]
    assert {kernel["kernel"] for kernel in kernels if kernel["stages"] >= 3} == {"_decode", "_prefill"}
    for kernel in kernels:
        assert kernel["LDGSTS"] > 0, kernel
        assert kernel["in_flight"] > 0 or kernel["stages"] < 3, kernel


def test_a_program_releases_the_part_that_it_stored(everywhere: Found) -> None:
    """And the last program to arrive acquires the others' parts. Wide heads have one part where sums are fixed."""
    decodes = [kernel for kernel in everywhere if kernel["kernel"] == "_decode"]
    divided = [each for each in decodes if not ("fixed" in each["case"] and each["case"].startswith("Gemma"))]
    assert divided
    for kernel in divided:
        assert kernel["joins"] == 1, kernel


def test_fixed_sums_are_the_same_instructions_for_few_rows_and_for_many(everywhere: Found) -> None:
    """And the same share of an output's columns for each warp, so that a row's softmax is summed alike. Beyond that few
    and many differ in how many warps share the rows."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for kernel in everywhere:
        case, name = kernel["case"], kernel["kernel"]
        if "fixed" not in case or not kernel["products"] or kernel["card"] == "B200":  # which is refused
            continue
        kind, _, rest = case.rpartition(", ")
        group, which = (kind, rest) if rest in ("few", "many") else (case, name)
        if name in ("_decode", "_prefill") or rest in ("few", "many"):
            layouts = [re.sub(r"warpsPerCTA = \[\d+, ", "warpsPerCTA = [, ", each) for each in kernel["layouts"]]
            shown = f"{kernel['products']}{layouts}"
            found.setdefault((kernel["card"], group), {}).setdefault(which, set()).add(shown)
    assert found
    for place, sides in found.items():
        assert len(sides) == 2, (place, sides)
        few, many = sides.values()
        assert few == many, place
