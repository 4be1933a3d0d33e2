"""Every kernel is compiled for five kinds of GPU, as the launchers launch it for popular models: it must fit, and what the
interpreter cannot see must hold, which is when programs start, how they synchronize and in which order they sum.

No GPU is needed. Compiled code is kept in pytest's cache, by the source's and the compiler's digest. A kernel is compiled
for all models and Hopper by the slow suite, for every card by `make nightly`, and for one model and Hopper, in a minute,
with `-m nightly -k quick`.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.support import cards
from tests.support.programs import printed_by

# A process for each, two at a time; some 190 kernels for each card in all, a few seconds each.
OTHERS = ["A100", "L40S", "B200", "RTX_PRO"]
JOBS = {
    "quick": [("quick", "H200")],
    "hopper": [("all", "H200"), *(("few", card) for card in OTHERS)],
    "everywhere": [("all", card) for card in ("H200", *OTHERS)],
}
MARKS = {"quick": pytest.mark.nightly, "hopper": pytest.mark.slow, "everywhere": pytest.mark.nightly}
PARTS = [pytest.param(name, marks=MARKS[name]) for name in JOBS]
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module", params=PARTS)
def reported(request: pytest.FixtureRequest) -> Lines:
    """Return every line that aot.py writes."""
    jobs = [("-m", "tests.support.aot", *job) for job in JOBS[request.param]]
    compile_job = partial(printed_by, timeout_s=3500, TRITON_CACHE_DIR=str(request.config.cache.mkdir("triton")))
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda job: compile_job(*job), jobs)
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith('{"card"')]


@pytest.fixture(scope="module")
def compiled(reported: Lines) -> Lines:
    """Return the lines of compiled kernels, of every card."""
    return [line for line in reported if "kernel" in line]


def test_every_kernel_compiles_for_every_card_that_can_run_it(reported: Lines, request: pytest.FixtureRequest) -> None:
    failed = [line for line in reported if "error" in line]
    assert not failed, failed
    (jobs,) = (JOBS[name] for name in JOBS if f"[{name}]" in request.node.name)
    assert {line["card"] for line in reported} == {card for _, card in jobs}
    lacking = {(line["card"], line["lacking"]) for line in reported if "lacking" in line}
    eight, dependent = "numbers of eight bits", "launches before the last kernel's end"
    assert lacking <= {("A100", eight), ("A100", dependent), ("L40S", dependent), ("B200", "fixed sums")}


def test_nothing_spills_and_shared_memory_suffices(compiled: Lines) -> None:
    wrong = [
        kernel
        for kernel in compiled
        if kernel["stack"] or kernel["spills"] or kernel["shared"] > getattr(cards, kernel["card"]).shared_bytes
    ]
    assert compiled and not wrong, wrong


def test_kernels_that_start_early_touch_nothing_before_their_turn(compiled: Lines) -> None:
    early = {kernel["kernel"] for kernel in compiled if kernel["is_dependent"]}
    assert {"_decode", "_rope_and_store", "_norm", "_gate_rows", "_few_rows"} <= early
    for kernel in compiled:
        if kernel["card"] == "H200":
            assert kernel["turns"] == ([1, 1, 0] if kernel["is_dependent"] else [0, 0, None]), kernel
            assert kernel["is_dependent"] == ("dependent" in kernel["case"]), kernel


def test_a_program_releases_the_part_that_it_stored(compiled: Lines) -> None:
    """The last program to arrive acquires the others' parts. Wide heads have one part where sums are fixed."""
    decodes = [kernel for kernel in compiled if kernel["kernel"] == "_decode"]
    divided = [each for each in decodes if not ("fixed" in each["case"] and each["case"].startswith("Gemma"))]
    assert divided
    for kernel in divided:
        assert kernel["joins"] == 1, kernel


def test_fixed_sums_are_the_same_instructions_for_few_rows_and_for_many(compiled: Lines) -> None:
    """A warp also has the same share of an output's columns, so that a row's softmax is summed alike. Few and many rows
    differ only in how many warps share the rows."""
    sums: dict[tuple[str, str], dict[str, set[str]]] = {}
    for kernel in compiled:
        case, name = kernel["case"], kernel["kernel"]
        if "fixed" not in case or not kernel["products"]:
            continue
        kind, _, rest = case.rpartition(", ")
        group, which = (kind, rest) if rest in ("few", "many") else (case, name)
        if name in ("_decode", "_prefill") or rest in ("few", "many"):
            layouts = [re.sub(r"warpsPerCTA = \[\d+, ", "warpsPerCTA = [, ", each) for each in kernel["layouts"]]
            shown = f"{kernel['products']}{layouts}"
            sums.setdefault((kernel["card"], group), {}).setdefault(which, set()).add(shown)
    assert sums
    for product, sides in sums.items():
        assert len(sides) == 2, (product, sides)
        few, many = sides.values()
        assert few == many, product
