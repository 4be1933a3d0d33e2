"""How reproductions of published results are shown: ratios, plots, the page."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks import pairs, published
from benchmarks.published import MARKS, PAGE, Report, Row, show, write_page

ROWS = [Row("requests", 20.0, 50.0, "per second"), Row("first <byte>", 3.0, 0.5, "s", False)]
FOUND = Report("thing", "A thing & more", "the way it was", "the way it is", "1 → 2 (others).", ROWS, "A note.")


@pytest.fixture(autouse=True)
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pairs, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(published, "IMAGES", tmp_path / "img")
    monkeypatch.setattr(published, "PAGE", tmp_path / "page.md")
    return tmp_path


def test_a_ratio_above_one_is_better_whatever_the_unit() -> None:
    assert [row.ratio for row in ROWS] == [2.5, 6.0]
    assert math.isnan(Row("nothing", 0.0, 3.0, "s").ratio)


def test_a_report_ends_in_a_table_a_line_and_a_plot(rooms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(FOUND)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "published-thing" and [row["ratio"] for row in line["rows"]] == [2.5, 6.0]
    drawing = ElementTree.parse(rooms / "img" / "published-thing.svg")
    widths = [float(bar.get("width", "0")) for bar in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] / widths[1] == pytest.approx(0.4, abs=0.01) and widths[3] / widths[2] == pytest.approx(
        1 / 6, abs=0.01
    )


def test_the_page_gets_the_figures_between_its_marks_and_keeps_the_rest(rooms: Path) -> None:
    page = rooms / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    for _ in range(2):
        write_page([FOUND], is_full=False)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith(f"{MARKS[1]}\nafter\n") and "old" not in text
        assert (
            "| requests | 20 | 50 | per second | 2.50 |" in text
            and "![A thing & more](img/published-thing.svg)" in text
        )


def test_the_page_of_this_project_has_the_marks_and_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / PAGE.name).read_text()
    assert text.index(MARKS[0]) < text.index(MARKS[1])
    monkeypatch.setattr("sys.argv", ["x", "nothing"])
    with pytest.raises(SystemExit):
        published.main()
    assert "'nothing' given; known are keys" in capsys.readouterr().err


def test_a_checkout_is_measured_against_a_revision_in_turn_and_by_each_ones_own_scripts(
    rooms: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def unpacked(commit: str, folder: Path) -> Path:
        return rooms / commit

    def run(*words: str, root: Path) -> dict[str, Any]:
        assert words == ("-m", "benchmarks.published", "keys", "--full")
        order.append(root.name)
        rate, seconds = (60.0, 2.0) if root.name == "changed" else (40.0, 3.0)
        rows = [Row("requests", 1.0, rate, "per second"), Row("time", 9.0, seconds, "s", False)]
        rows += [Row("since then", 1.0, 1.0, "s", False)] if root.name == "changed" else []
        return {"rows": [row._asdict() for row in rows]}

    monkeypatch.setattr(published, "unpacked", unpacked)
    monkeypatch.setattr(published, "run", run)
    monkeypatch.setattr(published, "git", lambda *_: b"changed\n")
    monkeypatch.setattr("sys.argv", ["x", "keys", "--full", "--against", "main", "--rounds", "2"])
    published.main()
    assert order == ["changed", "main", "main", "changed"]
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {what: figure["ratio"] for what, figure in line["figures"].items() if "since" not in what} == {
        "keys, requests": 1.5,
        "keys, time": 1.5,
    }
    assert math.isnan(line["figures"]["keys, since then"]["main"])
