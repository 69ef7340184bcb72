"""Which models a service offers: from `--model`, given once or more often, or from a file with a table for each.

[[model]]
model = "smollm2-135m"       # what --model takes
name = "small"               # what clients call it
price_prompt = "0.02"        # per 1,000,000 tokens, as --price-prompt
replicas = 2
idle_sleep_s = 300
max_context = 2048           # and any other setting of the engine
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.sizing import AUTO_MOST, MIB
from engine.weights.sources import ModelSource
from gateway.fleet.deployment import Manners, Needs
from gateway.settings import SettingError, Settings

OF_THE_SERVICE = ("replicas", "idle_sleep_s", "idle_unload_s", "price_prompt", "price_cached", "price_completion")
"""Settings of the command line that a model in the file may have otherwise."""
OF_THE_ENGINE = tuple(name for name in EngineConfig.__struct_fields__ if name not in ("model", "served_name"))
PROCESS_BYTES = 320 * MIB
"""What an engine process takes beside weights and KV cache: mostly torch."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One model on offer, as it was asked for."""

    engine: EngineConfig
    """`served_name` is empty where the model's own name will do."""
    replicas: int = 1
    price_prompt: str = ""
    price_cached: str = ""
    price_completion: str = ""
    manners: Manners = Manners()
    memory_mib: int = 0
    """What a replica takes while it is awake; 0 estimates it from files and settings."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One model on offer, and where its files are."""

    name: str
    source: ModelSource
    offer: Offer


def offers_of(settings: Settings) -> list[Offer]:
    """All models of the settings, in their order, the first being the one that first questions are asked of. Raises
    SettingError, naming the option or the file's field."""
    if settings.models_file:
        return _from_file(settings)
    return [
        _offer(settings, {"model": model, "name": settings.engine.served_name if index == 0 else ""}, "--model")
        for index, model in enumerate([settings.engine.model, *settings.more_models])
    ]


def _from_file(settings: Settings) -> list[Offer]:
    path = Path(settings.models_file)
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"--models-file {path} cannot be read: {error}") from error
    tables = document.pop("model", None)
    if document:
        raise SettingError(f"{path}: there is no setting {sorted(document)[0]!r}; a model is a table [[model]]")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"{path}: it needs a table [[model]] for each model")
    return [_offer(settings, table, f"{path}: [[model]] {number}") for number, table in enumerate(tables, 1)]


def _offer(settings: Settings, table: dict[str, Any], where: str) -> Offer:
    """One model: what its table says, and the settings of the service where it says nothing."""
    table = dict(table)
    if not table.get("model"):
        raise SettingError(f"{where}: model is missing")
    own: dict[str, Any] = {name: table.pop(name, getattr(settings, name)) for name in OF_THE_SERVICE}
    engine = {name: table.pop(name) for name in list(table) if name in OF_THE_ENGINE}
    asked = {"model": table.pop("model"), "served_name": table.pop("name", "")}
    manners = {
        "sleep_s": own.pop("idle_sleep_s"), "unload_s": own.pop("idle_unload_s"), "pinned": table.pop("pinned", False),
    }  # fmt: skip
    memory = table.pop("memory_mib", 0)
    if table:
        raise SettingError(f"{where}: a model has no setting {sorted(table)[0]!r}")
    base = msgspec.to_builtins(settings.engine)
    try:
        return msgspec.convert(
            {"engine": {**base, **engine, **asked}, "manners": manners, "memory_mib": memory, **own}, Offer
        )
    except msgspec.ValidationError as error:
        raise SettingError(f"{where}: {error}") from error


def check(served: Sequence[Served]) -> None:
    """Raise SettingError where two models have one name."""
    names = [one.name for one in served]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"two models are called {name!r}; give them names of their own (name in --models-file)")


def needs_of(served: Served, budget: int) -> Needs:
    """What a replica of the model takes: the size of its files, twice that where a CPU makes 16-bit weights 32-bit
    ones, and the KV cache that `sized` gives it."""
    offer = served.offer
    cache = sized(offer.engine, budget).kv_memory_mib * MIB
    if offer.memory_mib:
        whole = offer.memory_mib * MIB
        return Needs(weights=max(0, whole - cache - PROCESS_BYTES), cache=min(cache, whole), process=PROCESS_BYTES)
    return Needs(weights=weight_bytes(served.source, offer.engine), cache=cache, process=PROCESS_BYTES)


def weight_bytes(source: ModelSource, engine: EngineConfig) -> int:
    """Memory of the weights, estimated from the files."""
    if source.kind == "gguf":
        return source.path.stat().st_size
    size = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
    widened = engine.device == "cpu" and engine.dtype in ("auto", "float32")
    return 2 * size if widened else size


def sized(engine: EngineConfig, budget: int) -> EngineConfig:
    """The engine's settings where models share a budget: a KV cache that would take its part of whatever is free takes
    an eighth of the budget instead."""
    if not budget or engine.kv_memory_mib:
        return engine
    return msgspec.structs.replace(engine, kv_memory_mib=max(16, min(budget // 8, AUTO_MOST) // MIB))
