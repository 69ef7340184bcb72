"""Models on offer: from options, or from a file with a table for each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.sizing import MIB
from engine.weights.sources import ModelSource
from gateway.cli import make_parser, read_settings
from gateway.fleet.deploy import gpus_here, shared
from gateway.fleet.offers import PROCESS_BYTES, Offer, Served, check, needs_of, offers_of, sized
from gateway.settings import SettingError, Settings

ENGINE = EngineConfig(device="cpu", threads=2, served_name="first")


def test_options_name_one_or_several() -> None:
    parse = make_parser().parse_args
    settings = read_settings(parse(["serve"]))
    assert (settings.engine.model, settings.more_models) == ("smollm2-135m", ())
    settings = read_settings(
        parse(["serve", "--model", "a", "--model", "b", "--served-name", "first", "--threads", "2", "--replicas", "3"])
    )
    offers = offers_of(settings)
    assert [(offer.engine.model, offer.engine.served_name) for offer in offers] == [("a", "first"), ("b", "")]
    assert all(offer.replicas == 3 and offer.engine.threads == 2 for offer in offers)


def test_a_file_has_a_table_for_each(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        """
        [[model]]
        model = "smollm2-135m"
        name = "small"
        price_prompt = "0.5"
        replicas = 2
        idle_sleep_s = 300
        max_context = 2048
        [[model]]
        model = "other/one"
        pinned = true
        memory_mib = 4096
        """
    )
    settings = Settings(models_file=str(path), engine=ENGINE, price_prompt="0.1", idle_unload_s=9, replicas=1)
    small, other = offers_of(settings)
    assert (small.engine.model, small.engine.served_name, small.engine.max_context) == ("smollm2-135m", "small", 2048)
    assert (small.replicas, small.price_prompt) == (2, "0.5")
    assert (small.manners.sleep_s, small.manners.unload_s, small.manners.pinned) == (300, 9, False)
    assert (other.engine.served_name, other.engine.threads, other.price_prompt) == ("", 2, "0.1")
    assert (other.manners.pinned, other.memory_mib) == (True, 4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not toml", "cannot be read"),
        ("", "needs a table"),
        ("model = 3", "needs a table"),
        ("port = 1\n[[model]]\nmodel = 'a'", "no setting 'port'"),
        ("[[model]]\nname = 'a'", r"\[\[model\]\] 1: model is missing"),
        (
            "[[model]]\nmodel = 'a'\n[[model]]\nmodel = 'b'\nspeed = 1",
            r"\] 2: a model has no setting 'speed'",
        ),
        ("[[model]]\nmodel = 'a'\nmax_running = 'many'", "max_running"),
        ("[[model]]\nmodel = 'a'\nreplicas = 'two'", "replicas"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        offers_of(Settings(models_file=str(path)))


def source(folder: Path, size: int) -> ModelSource:
    (folder / "model.safetensors").write_bytes(b"x" * size)
    return ModelSource(folder, "safetensors", "m")


def test_two_models_have_two_names(tmp_path: Path) -> None:
    one = Served(name="same", source=source(tmp_path, 1), offer=Offer(engine=ENGINE))
    check([one])
    with pytest.raises(SettingError, match="two models are called 'same'"):
        check([one, one])


def test_what_a_replica_takes(tmp_path: Path) -> None:
    def needs(budget: int, memory_mib: int = 0, **engine: object) -> tuple[int, int]:
        chosen = msgspec.structs.replace(ENGINE, **engine)
        offer = Offer(engine=chosen, memory_mib=memory_mib)
        found = needs_of(Served(name="m", source=source(tmp_path, 1000), offer=offer), budget)
        assert found.process == PROCESS_BYTES
        return found.weights, found.cache

    assert needs(0) == (2000, 0), "16-bit weights are 32-bit ones on a CPU"
    assert needs(0, dtype="bfloat16") == (1000, 0)
    assert needs(800 * MIB) == (2000, 100 * MIB)
    assert needs(800 * MIB, kv_memory_mib=64) == (2000, 64 * MIB)
    weights, cache = needs(800 * MIB, memory_mib=700)
    assert weights + cache + PROCESS_BYTES == 700 * MIB
    assert sized(ENGINE, 0) is ENGINE


def test_replicas_share_the_cores_and_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = EngineConfig(device="cpu")
    assert shared(alone, 1).threads == 0 and shared(alone, 64).threads == 1
    assert shared(ENGINE, 4).threads == 2, "who says so has them"
    assert shared(EngineConfig(device="cuda"), 4).threads == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,")
    assert gpus_here() == ["3", "5"]
