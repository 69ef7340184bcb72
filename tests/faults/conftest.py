"""A real gateway process with a scripted engine under it, for tests of what clients and crashes do to the books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.rig.headrace import MODEL, House
from engine.script import Script

REPLY = tuple(range(1000, 1040))


@pytest.fixture
def scripted_house(tmp_path: Path, model_path: Path) -> Callable[..., House]:
    """Return a function that lays out an installation whose engine follows the given fields of a Script."""
    assert model_path.exists()

    def build(**fields: object) -> House:
        script = Script(reply=REPLY, kv_tokens=4_000_000, **fields)  # type: ignore[arg-type]
        return House(tmp_path / "data", MODEL, script)

    return build
