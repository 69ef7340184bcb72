from __future__ import annotations

import pytest

from engine.weights.progress import TerminalProgress


def test_one_bar_per_thing_and_never_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress() as show:
        show("fetching a", 0, 1024)
        show("fetching a", 512, 1024)
        show("fetching a", 256, 1024)
        show("fetching a", 1024, 1024)
        show("unpacking", 10, 0)
    shown = capsys.readouterr().err
    assert "fetching a: 100%" in shown
    assert "unpacking: 10.0B" in shown
    assert shown.endswith("\n")
