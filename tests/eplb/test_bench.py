"""`penstock bench eplb`: its workloads, its tables, its picture."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.cli import main
from penstock.eplb import bench, workloads


def pixels(png: bytes) -> NDArray[np.uint8]:
    """Decode what `bench.png` writes, checking every checksum."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + data)
        parts[kind] = data
        at += 12 + size
    width, height, *rest = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0] and [*parts] == [b"IHDR", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_picture_decodes_to_the_pixels_it_was_made_of() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert (pixels(bench.png(image)) == image).all()


def test_heavy_ranks_are_red_light_ones_blue_and_even_ones_white() -> None:
    heavy, light, even = bench.colours(np.array([[4.0, 0.0, 2.0, 2.0]]))[0, :3].astype(int)
    assert heavy[0] > 150 > 50 > heavy[1]
    assert light[2] > 150 > 50 > light[0]
    assert even.min() > 230
    assert (bench.colours(np.zeros((2, 3))) == even).all()


@pytest.mark.parametrize("kind", workloads.KINDS)
def test_a_load_counts_every_token_once_per_expert_it_goes_to(kind: str) -> None:
    cell = workloads.CELLS[1]
    counts = workloads.load(cell, kind, 0)
    assert counts.shape == (26, 64)
    assert counts.sum(1) == pytest.approx(workloads.TOKENS * 6, rel=0.01)
    assert (counts == workloads.load(cell, kind, 0)).all() and (counts != workloads.load(cell, kind, 1)).any()


def test_drift_changes_a_load_more_the_stronger_it_is() -> None:
    cell = workloads.CELLS[1]
    before = workloads.load(cell, "logn1", 0)
    change = [np.abs(workloads.drifted(cell, "logn1", 0, drift) - before).sum() for drift in workloads.DRIFTS]
    assert change == sorted(change) and change[0] < 0.01 * before.sum() < 0.3 * before.sum() < change[-1]


def test_the_command_prints_tables_and_writes_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, rows = tmp_path / "map.png", tmp_path / "rows.json"
    options = ["--model", "V2-Lite", "--seeds", "1", "--repeats", "1", "--image", str(image), "--json", str(rows)]
    assert main(["bench", "eplb", *options]) == 0
    printed = capsys.readouterr().out
    assert "Plans from scratch" in printed and "moved %" in printed and str(image) in printed
    drawn = pixels(image.read_bytes())
    assert drawn.shape == (26 * 16 + 2 * 16, 2 * 8 * 16 + 3 * 16, 3)
    left, right = drawn[16:-16:16, 16 : 16 + 128 : 16], drawn[16:-16:16, 32 + 128 : -16 : 16]  # a corner of every cell
    assert left.shape == right.shape == (26, 8, 3)
    assert right.min() > 230 > 100 > left.min()  # even after, not before
    assert (drawn[:16] == drawn[0, 0]).all() and drawn[0, 0].max() < 100  # framed: white cells stand out
    saved = json.loads(rows.read_text())
    assert len(saved["plans"]) == 6 and len(saved["moves"]) == 4
    for row in saved["plans"]:
        assert row["published"] - 1e-6 <= row["balance"] <= row["bound"] + 1e-9
        assert row["repeats"] == 0
    assert next(row["moved %"] == 0 for row in saved["moves"])


@pytest.mark.parametrize("option", ["--seeds", "--repeats"])
def test_a_benchmark_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "eplb", option, "0"])
    assert "0, must be at least 1" in capsys.readouterr().err


def test_rows_that_cannot_be_written_are_refused_early_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--json", "--image"):
        with pytest.raises(SystemExit):
            main(["bench", "eplb", option, str(tmp_path / "none" / "x")])
        assert f"argument {option}: {tmp_path}/none/x cannot be written" in capsys.readouterr().err
    options = ["--model", "V2-Lite", "--seeds", "1", "--repeats", "1", "--image", str(tmp_path / "map.png")]
    assert main(["bench", "eplb", *options, "--json", "/dev/full"]) == 2
    printed, said = capsys.readouterr()
    assert len(json.loads(printed[printed.index("{") :])["plans"]) == 6
    assert said == "penstock: the results cannot be written: [Errno 28] No space left on device; they are printed\n"


@pytest.mark.parametrize("target", ["nan", "0", "1.5"])
def test_a_target_that_no_plan_can_have_is_refused(target: str) -> None:
    with pytest.raises(SystemExit, match="target: .* given; more than 0 and at most 1 is expected"):
        main(["bench", "eplb", "--target", target])
