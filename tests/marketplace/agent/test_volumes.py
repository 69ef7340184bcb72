"""Files of volumes that are to be erased."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from marketplace.agent import volumes


def test_what_there_is_of_a_volume_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("gone.qcow2", "kept.qcow2"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "file").write_bytes(b"x")
    outside = tmp_path.parent / "outside.qcow2"
    outside.write_bytes(b"x")
    for _ in range(2):
        volumes.erase(tmp_path, ["gone", "never-was", "../outside", ""])
    assert [path.name for path in tmp_path.iterdir()] == ["kept.qcow2"] and outside.exists()


def test_a_volume_that_cannot_be_removed_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    real = shutil.rmtree

    def stubborn(path: Path) -> None:
        if path.name == "first":
            raise PermissionError("somebody else's")
        real(path)

    monkeypatch.setattr(volumes.shutil, "rmtree", stubborn)
    volumes.erase(tmp_path, ["first", "second"])
    assert [path.name for path in tmp_path.iterdir()] == ["first"] and "volume first" in caplog.text


def test_what_volumes_take_of_the_disk_is_measured(tmp_path: Path) -> None:
    disk = tmp_path / "one.qcow2"
    with disk.open("wb") as file:
        file.write(b"x" * 65536)
        file.truncate(1 << 30)
    (tmp_path / "two" / "sub").mkdir(parents=True)
    file = tmp_path / "two" / "sub" / "file"
    file.write_bytes(b"x" * 8192)
    (tmp_path / "two" / "again").hardlink_to(file)
    (tmp_path / "two" / "link").symlink_to(disk)
    (tmp_path / "half.new").write_bytes(b"x" * 4096)
    found = volumes.used(tmp_path)
    assert sorted(found) == ["one", "two"]
    assert 65536 <= found["one"] < 1 << 20, "a hole takes nothing"
    assert 8192 <= found["two"] < 65536, "names of one file count once, and links are not followed"
    assert volumes.used(tmp_path / "nothing") == {}
