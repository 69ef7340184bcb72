"""The plot of a sweep: medians over repetitions in rising concurrency, and a real PNG."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plot import draw, main, series

DOCUMENT = {
    "provenance": {"cpu": "some processor", "cores": 2, "date": "2026-01-02T03:04:05+00:00"},
    "results": [
        {"label": label, "concurrency": c, "completed": done, "output_tok_s": rate, "ttft_p50_ms": 100.0 * c}
        for label, c, rate, done in (
            ("ours", 4, 40.0, 12),
            ("ours", 1, 10.0, 8),
            ("ours", 1, 14.0, 8),
            ("ours", 1, 13.0, 8),
            ("ours", 1, 999.0, 0),
            ("peer", 1, 5.0, 8),
        )
    ],
}


def test_series_are_medians_in_rising_concurrency() -> None:
    assert series(DOCUMENT, "output_tok_s") == {"ours": [(1, 13.0), (4, 40.0)], "peer": [(1, 5.0)]}


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    draw(DOCUMENT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_sweep_there_is_a_hint(tmp_path: Path) -> None:
    assert main(["--sweep", str(tmp_path / "none.json"), "--out", str(tmp_path / "x.png")]) == 1
    assert list(tmp_path.iterdir()) == []
