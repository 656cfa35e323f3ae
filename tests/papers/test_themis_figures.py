"""The pictures of Themis's evaluation: drawn from the document alone, the same from the same figures."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.papers.document import Report, Table
from benchmarks.papers.themis import COLUMNS, RHOS

pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib; install the extra demo")


def row(name: str, max_rho: str, hours: str) -> tuple[str, ...]:
    return (name, max_rho, *("0",) * 4, hours, *("0",) * (len(COLUMNS) - 7))


def document(folder: Path) -> Path:
    """A document of two policies, in which the other setting has other figures."""
    tables = (
        Table(
            f"published: {RHOS}, workload 1, 32 GPUs, contention 4",
            ("policy", "seed", "rho, rising"),
            (("themis", "3", "0.5 0.9"), ("srtf", "3", "0.25 2.0")),
        ),
        Table(
            "published: contention",
            ("work", "policy", "max rho"),
            (("1x", "themis", "0.9 ± 0.1"), ("4x", "themis", "1.2"), ("1x", "srtf", "1.5"), ("4x", "srtf", "3.0")),
        ),
        Table("published: sweep of fairness_knob, contention 4", COLUMNS, (row("fairness_knob 0", "2.0", "80"),)),
        Table("published: sweep of lease_s, contention 1", COLUMNS, (row("lease_s 600", "1.0 ± 0.5", "90"),)),
        Table("harder: contention", ("work", "policy", "max rho"), (("1x", "fifo", "7.0"),)),
    )
    file = folder / "document.json"
    file.write_bytes(msgspec.json.encode(Report("themis-evaluation/v2", (), tables, {}, 0.0)))
    return file


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    from benchmarks.papers import themis_figures

    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["themis_figures", str(document(folder)), str(folder)])
    assert themis_figures.main() == 0
    return {file.name: file.read_text() for file in sorted(folder.glob("*.svg"))}


def test_three_pictures_are_drawn_and_the_same_document_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drawn(tmp_path / "one", monkeypatch)
    assert list(first) == ["themis-contention.svg", "themis-rho.svg", "themis-sweeps.svg"]
    assert all("srtf" in first[name] for name in ("themis-contention.svg", "themis-rho.svg"))
    assert "workload 1, 32 GPUs, contention 4" in first["themis-rho.svg"]
    assert "greatest rho" in first["themis-sweeps.svg"]
    assert "GPU-hours" in first["themis-sweeps.svg"]
    assert "fifo" not in first["themis-contention.svg"], "of one setting only"
    assert drawn(tmp_path / "two", monkeypatch) == first
