"""An answer with an adapter is that of the model with the adapter merged into its weights, whatever else runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import ScriptedDevice
from engine.layers.linear import MergedLinear, Part
from engine.lora import AdaptedLinear, Adapters, adapters_of
from engine.lora_files import Delta, read_adapter
from engine.lora_loading import AdapterLoads
from engine.lora_names import named
from engine.models.registry import CausalLM, load_model
from engine.sampling_params import SamplingParams
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource
from engine.wire import AdapterQuery, AdapterReply, Submit, pack_tokens, unpack_tokens
from kernels.fallback import TorchOps
from tests.engine.tiny_models import VOCAB, tiny_checkpoint

OPS = TorchOps()
BASE = EngineConfig(
    device="cpu", threads=1, kv_memory_mib=4, max_running=4, step_tokens=32, max_context=96, max_loras=2,
    max_lora_rank=8,
)  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "lora_alpha": 8, "modules": ("q_proj", "v_proj", "down_proj")},
    "two": {
        "r": 8, "lora_alpha": 6, "use_rslora": True,
        "modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.self_attn.k_proj": 3},
    },
}  # fmt: skip
PROMPT = [(7 * i) % 50 + 3 for i in range(20)]


def scale_of(settings: Mapping[str, Any], name: str) -> tuple[int, float]:
    rank = 2 if "rank_pattern" in settings and "k_proj" in name else settings["r"]
    alpha = 3 if "alpha_pattern" in settings and name.endswith("layers.1.self_attn.k_proj") else settings["lora_alpha"]
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def write_adapter(
    folder: Path, weights: dict[str, Tensor], settings: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Write an adapter as PEFT does; return the base's weights with it merged in."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    merged, tensors = dict(weights), {}
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        if not name.endswith(settings["modules"]):
            continue
        rank, scale = scale_of(settings, name)
        a = torch.randn(rank, weight.shape[1], generator=draw) * 0.3
        b = torch.randn(weight.shape[0], rank, generator=draw) * 0.3
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        merged[key] = weight + scale * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "bias": "none", "target_modules": list(settings["modules"])}
    config |= {name: value for name, value in settings.items() if name != "modules"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "base", the adapters "one" and "two", and "merged one", "merged two"."""
    root = tmp_path_factory.mktemp("lora")
    made = {"base": tiny_checkpoint(root / "base", "llama")}
    weights = load_file(made["base"] / "model.safetensors")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        merged = write_adapter(root / name, weights, settings, seed)
        made[name], made[f"merged {name}"] = root / name, root / f"merged {name}"
        made[f"merged {name}"].mkdir()
        (root / f"merged {name}" / "config.json").write_text((made["base"] / "config.json").read_text())
        save_file(merged, root / f"merged {name}" / "model.safetensors", metadata={"format": "pt"})
    return made


def model_of(folder: Path, **settings: Any) -> CausalLM:
    return load_model(ModelSource(folder, "safetensors", "tiny"), msgspec.structs.replace(BASE, **settings), OPS)


def core_of(folders: Mapping[str, Path], *names: str, device: Any = None, **settings: Any) -> EngineCore:
    """An engine with these adapters."""
    config = msgspec.structs.replace(BASE, lora=tuple(f"{name}={folders[name]}" for name in names), **settings)
    model = load_model(ModelSource(folders["base"], "safetensors", "tiny"), config, OPS)
    return EngineCore(config, model, OPS, device=device, clock=lambda: 0.0)


def submit(core: EngineCore, request_id: str, adapter: str = "", tokens: int = 12, **params: Any) -> Any:
    settings = SamplingParams(max_tokens=tokens, ignore_eos=True, **{"temperature": 0.0, **params})
    return core.submit(Submit(request_id=request_id, prompt=pack_tokens(PROMPT), params=settings, adapter=adapter))


def finish(core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
    """Run to the end: tokens and finish reason of each request."""
    said: dict[str, tuple[list[int], str | None]] = {}
    while core.has_work():
        for progress in core.step():
            tokens, _ = said.get(progress.request_id, ([], None))
            said[progress.request_id] = (tokens + unpack_tokens(progress.tokens), progress.finish_reason)
    core.check()
    return said


def answer(adapters: Adapters | None, query: AdapterQuery) -> AdapterReply:
    """Ask, and wait for what has to be read."""
    loads, told = AdapterLoads(), list[AdapterReply]()
    loads.ask(adapters, query, told.append)
    loads.settle(30.0)
    return told[0]


def fill(linear: MergedLinear, slot: int, delta: Delta) -> None:
    """Put an adapter of the matrix "m" into a slot."""
    adapted = linear.adapted
    assert isinstance(adapted, AdaptedLinear)
    filling = adapted.prepare({"m": delta})
    assert filling is not None and adapted.prepare({}) is None
    adapted.put(slot, filling)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """What the base and the merged models say, each alone."""
    wanted = {}
    for name, folder in (("", "base"), ("one", "merged one"), ("two", "merged two")):
        core = EngineCore(BASE, model_of(folders[folder], max_loras=0), OPS)
        submit(core, "a")
        wanted[name] = finish(core)["a"][0]
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3, "adapters that change nothing test nothing"
    return wanted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"graphs": "on"},
        {"step_tokens": 7, "max_running": 3},
        {"speculate": "lookup"},
        {"graphs": "on", "late": True},
    ],
    ids=str,
)
def test_a_mixed_batch_says_what_the_merged_models_say(
    folders: dict[str, Path], expected: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    late = settings.pop("late", False)
    core = core_of(folders, "one", "two", device=ScriptedDevice() if late else None, **settings)
    for turn in range(2):  # the second time prompts are cached, each for its own adapter
        for name in expected:
            assert submit(core, f"{turn} {name}", name) is None
        said = finish(core)
        assert {name: said[f"{turn} {name}"][0] for name in expected} == expected
    assert core.snapshot().cached_tokens == 3 * 16


def test_padding_asks_for_no_row(folders: dict[str, Path], expected: dict[str, list[int]]) -> None:
    """A prompt beside a decode, with room for one more: where its row would be, an earlier step left a position."""
    core = core_of(folders, "one", graphs="on", max_running=3)
    submit(core, "a", "one")
    said: list[int] = []
    for _ in range(8):
        said += unpack_tokens(core.step()[0].tokens)
    submit(core, "b", "one")
    ended = finish(core)
    assert said + ended["a"][0] == ended["b"][0] == expected["one"]


def test_drawn_tokens_do_not_depend_on_who_else_runs(folders: dict[str, Path]) -> None:
    alone, together = [], core_of(folders, "one", "two")
    for name in ("", "one", "two"):
        core = core_of(folders, "one", "two")
        submit(core, name, name, temperature=0.8, seed=4, logprobs=1)
        submit(together, name, name, temperature=0.8, seed=4, logprobs=1)
        alone.append(finish(core)[name])
    assert list(finish(together).values()) == alone


def test_whole_decoders_and_adapters_share_an_engine(folders: dict[str, Path], expected: dict[str, list[int]]) -> None:
    """The native operations run a step without adapters as one operation, and others by its layers."""
    import kernels

    ops = kernels.table("cpu", "auto", 1)
    config = msgspec.structs.replace(BASE, lora=(f"two={folders['two']}",))
    core = EngineCore(config, load_model(ModelSource(folders["base"], "safetensors", "tiny"), config, ops), ops)
    for name in ("", "two"):
        submit(core, name, name)
    submit(core, "later", "", tokens=16)
    said = finish(core)
    assert (said[""][0], said["two"][0]) == (expected[""], expected["two"])
    assert said["later"][0][:12] == expected[""]


def test_an_unknown_adapter_is_refused_by_name(folders: dict[str, Path]) -> None:
    for core in (core_of(folders, "one"), core_of(folders, max_loras=0)):
        refused = submit(core, "a", "three")
        assert (refused.code, "three" in refused.message) == ("unknown_adapter", True)
        assert not core.has_work()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_unloading_ends_nobody_and_frees_the_place_afterwards(
    folders: dict[str, Path], expected: dict[str, list[int]], graphs: str
) -> None:
    core = core_of(folders, "one", graphs=graphs, max_loras=1)
    adapters = adapters_of(core.model)
    submit(core, "running", "one")
    first = unpack_tokens(core.step()[0].tokens)
    submit(core, "waiting", "one")
    assert answer(adapters, AdapterQuery(1, "one")).names == []
    assert submit(core, "late", "one").code == "unknown_adapter"
    taken = answer(adapters, AdapterQuery(2, "two", str(folders["two"])))
    assert "max_loras" in taken.error and taken.names == []
    said = finish(core)
    assert first + said["running"][0] == said["waiting"][0] == expected["one"]
    assert {reason for _, reason in said.values()} == {"length"}
    assert answer(adapters, AdapterQuery(3, "one", str(folders["two"]))).names == ["one"]
    submit(core, "again", "one")
    assert finish(core)["again"][0] == expected["two"], "the old one's cached pages are not the new one's"
    assert "loaded already" in answer(adapters, AdapterQuery(4, "one", str(folders["two"]))).error
    assert "no adapter" in answer(adapters, AdapterQuery(5, "two")).error


def test_an_engine_without_places_takes_no_adapter(folders: dict[str, Path]) -> None:
    reply = answer(adapters_of(core_of(folders, max_loras=0).model), AdapterQuery(1, "one", str(folders["one"])))
    assert "max_loras" in reply.error


def test_rows_that_are_stored_in_another_order_are_changed_where_they_lie() -> None:
    draw = torch.Generator().manual_seed(1)
    weight, order = torch.randn(6, 8, generator=draw), torch.tensor([3, 0, 5, 1, 4, 2])
    delta = Delta(torch.randn(2, 8, generator=draw), torch.randn(6, 2, generator=draw))
    x = torch.randn(3, 8, generator=draw)
    wanted = x @ (weight + delta.b @ delta.a)[order].T
    for padded in (False, True):
        linear = MergedLinear(OPS, [weight[order]])
        adapters = Adapters(OPS, [(linear, [Part("m", 6, order)])], slots=2, rank=2)
        if padded:
            adapters.pad()
        fill(linear, 1, delta)
        adapters.begin(torch.tensor([1, -1, 1], dtype=torch.int32))
        result = linear(x)
        assert torch.allclose(result[[0, 2]], wanted[[0, 2]], atol=1e-5)
        assert torch.equal(result[1], OPS.linear(x, linear.weight)[1])


def test_in_deterministic_mode_a_padded_row_has_the_same_bits_whatever_is_beside_it() -> None:
    draw = torch.Generator().manual_seed(2)
    linear = MergedLinear(OPS, [torch.zeros(64, 700)])
    adapters = Adapters(OPS, [(linear, [Part("m", 64, None)])], slots=2, rank=16, deterministic=True)
    adapters.pad()
    delta = Delta(torch.randn(16, 700, generator=draw), torch.randn(64, 16, generator=draw))
    fill(linear, 1, delta)
    x = torch.randn(300, 700, generator=draw)
    adapters.begin(torch.ones(300, dtype=torch.int32))
    together = linear(x)
    assert torch.allclose(together, x @ (delta.b @ delta.a).T, atol=2e-2)
    for rows in (slice(0, 1), slice(0, 7), slice(130, 131), slice(290, 300)):
        adapters.begin(torch.ones(rows.stop - rows.start, dtype=torch.int32))
        assert torch.equal(linear(x[rows]), together[rows])


def test_what_overflows_in_one_adapter_reaches_no_other_row() -> None:
    linear = MergedLinear(OPS, [torch.eye(4)])
    adapters = Adapters(OPS, [(linear, [Part("m", 4, None)])], slots=2, rank=1)
    adapters.pad()
    fill(linear, 0, Delta(torch.full((1, 4), 3e38), torch.ones(4, 1)))
    adapters.begin(torch.tensor([0, -1, 1], dtype=torch.int32))
    x = torch.ones(3, 4)
    assert torch.equal(linear(x)[1:], x[1:]) and not torch.isfinite(linear(x)[0]).any()


def test_an_adapter_whose_scale_overflows_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["one"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    configure(lora_alpha=1e300)(tmp_path)
    adapters = adapters_of(core_of(folders, max_loras=1).model)
    assert "holds" in answer(adapters, AdapterQuery(1, "one", str(tmp_path))).error
    assert answer(adapters, AdapterQuery(2, "one", str(folders["one"]))).names == ["one"]


def spoil(name: str, change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return do


def configure(**values: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return do


WEIGHTS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("break_it", "named_in_it"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), ["adapter_config.json"]),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), ["adapter_config.json"]),
        (configure(peft_type="IA3"), ["adapter_config.json", "peft_type"]),
        (configure(r=0), ["adapter_config.json", "r must"]),
        (configure(r=16), [WEIGHTS, "lora_A.weight", "[4, 48]", "[16, 48]"]),
        (configure(lora_alpha=None), ["adapter_config.json", "lora_alpha"]),
        (configure(lora_alpha=math.inf), ["adapter_config.json", "lora_alpha"]),
        (configure(alpha_pattern={"q_proj": "much"}), ["adapter_config.json", "alpha_pattern", "much"]),
        (configure(rank_pattern={"q_proj": 0}), ["adapter_config.json", "rank_pattern"]),
        (configure(rank_pattern={"q_proj(": 4}), ["adapter_config.json", "rank_pattern", "q_proj("]),
        (configure(rank_pattern=["q_proj"]), ["adapter_config.json", "rank_pattern"]),
        (configure(bias="all"), ["adapter_config.json", "bias"]),
        (configure(use_dora=True), ["adapter_config.json", "use_dora"]),
        (configure(modules_to_save=["lm_head"]), ["adapter_config.json", "modules_to_save"]),
        (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS]),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]), [WEIGHTS]),
        (spoil(WEIGHTS, lambda t: t.pop(f"{Q}.lora_B.weight")), [WEIGHTS, "layers.0.self_attn.q_proj.lora_B"]),
        (
            spoil(WEIGHTS, lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(3, 4)})),
            [WEIGHTS, "layers.0.self_attn.q_proj.lora_B", "[3, 4]"],
        ),
        (
            spoil(WEIGHTS, lambda t: t[f"{Q}.lora_A.weight"].fill_(math.nan)),
            [WEIGHTS, "layers.0.self_attn.q_proj.lora_A", "finite"],
        ),
        (spoil(WEIGHTS, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)})), [WEIGHTS, "lm_head"]),
        (
            spoil(WEIGHTS, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)})),
            [WEIGHTS, "lm_head"],
        ),
    ],
)  # fmt: skip
def test_a_broken_adapter_is_refused_by_file_and_tensor_and_changes_nothing(
    folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path, break_it: Any, named_in_it: list[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folders["one"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    break_it(broken)
    shapes = {
        key.removesuffix(".weight"): (value.shape[0], value.shape[1])
        for key, value in load_file(folders["base"] / "model.safetensors").items()
        if value.dim() == 2 and ".layers." in key
    }
    assert len(read_adapter(folders["one"], shapes, most_rank=8)) == 6
    with pytest.raises(WeightsError) as caught:
        read_adapter(broken, shapes, most_rank=8)
    assert str(broken) in str(caught.value)
    for text in named_in_it:
        assert text in str(caught.value)


def test_a_rank_over_the_limit_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(WeightsError, match="max_lora_rank 4"):
        core_of(folders, "two", max_lora_rank=4)


def test_a_model_that_embeds_takes_no_adapters(folders: dict[str, Path]) -> None:
    with pytest.raises(WeightsError, match="takes no adapters"):
        model_of(folders["base"], task="embed")


def test_adapters_are_named_once_with_a_folder() -> None:
    assert named(("a=/x", "b=/y=z")) == {"a": "/x", "b": "/y=z"}
    for wrong in (("a",), ("=x",), ("a=",), ("a=x", "a=y")):
        with pytest.raises(ValueError, match="NAME=FOLDER"):
            named(wrong)
    assert max(PROMPT) < VOCAB
