"""What is read of a quantised checkpoint's configuration and headers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.weights.errors import WeightsError
from engine.weights.quantized import read_scheme
from engine.weights.safetensors import SafetensorsCheckpoint
from kernels.interface import ScaledWeight
from kernels.mxfp4 import dequantize_mxfp4
from kernels.scaled import dequantize_scaled
from tests.engine.weights import packers
from tests.engine.weights.quantized_checkpoints import CASES, INT4, make


class Tensors:
    """The tensors of a checkpoint in a dictionary."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def header(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        found = self._tensors.get(name)
        return (
            None
            if found is None
            else ({torch.uint8: "U8", torch.int8: "I8"}.get(found.dtype, "F32"), tuple(found.shape))
        )

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def wrong(self, name: str, what: str) -> WeightsError:
        return WeightsError(f"memory: tensor {name!r} {what}")


def test_experts_of_mxfp4_come_as_one_matrix() -> None:
    g = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(118, 130, (3, 8, 2), dtype=torch.uint8, generator=g)
    stored = Tensors({"mlp.experts.up_blocks": blocks, "mlp.experts.up_scales": scales, "router": torch.ones(3)})
    scheme = read_scheme(Path("config.json"), {"quant_method": "mxfp4", "modules_to_not_convert": ["router"]})
    assert scheme is not None and scheme.shape(stored, "router") is None
    assert scheme.shape(stored, "mlp.experts.up") == (3, 8, 64)
    part = scheme.read(stored, "mlp.experts.up")
    assert torch.equal(dequantize_scaled(part).reshape(3, 8, 64), dequantize_mxfp4(blocks, scales))
    with pytest.raises(WeightsError, match=r"'mlp\.experts\.up_scales' is missing"):
        scheme.shape(Tensors({"mlp.experts.up_blocks": blocks}), "mlp.experts.up")


@pytest.mark.parametrize("symmetric", [True, False])
def test_four_bits_that_lie_in_bytes_are_read(symmetric: bool) -> None:
    """As where activations are rounded, too: int-quantized, whatever the number of bits."""
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 4)
    scale, zero = torch.tensor([[0.5, 2.0], [1.0, 4.0]]), torch.tensor([[-3, 0], [2, -8]], dtype=torch.int8)
    tensors = {"up.weight": codes, "up.weight_scale": scale} | ({} if symmetric else {"up.weight_zero_point": zero})
    config = packers.compressed("int-quantized", {**INT4, "symmetric": symmetric})
    scheme = read_scheme(Path("config.json"), config)
    assert scheme is not None and scheme.shape(Tensors(tensors), "up.weight") == (2, 64)
    less = codes.float() - (0 if symmetric else zero.float().repeat_interleave(32, 1))
    part = scheme.read(Tensors(tensors), "up.weight")
    assert torch.equal(dequantize_scaled(part), less * scale.repeat_interleave(32, 1))


GPTQ = CASES["gptq"][1]
AWQ = CASES["awq"][1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "exl2"}, "quantization_config.quant_method' is 'exl2', which is not supported"),
        ({"quant_method": None}, "quantization_config.quant_method' is None"),
        ("awq", "'quantization_config' should be an object"),
        ({**GPTQ, "bits": 3}, "quantization_config.bits' is 3, which is not supported (supported: 4, 8)"),
        ({**GPTQ, "bits": True}, "quantization_config.bits' is True"),
        ({**GPTQ, "group_size": 24}, "quantization_config.group_size' is 24, should be"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format' is 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "quantization_config.dynamic' is"),
        ({**GPTQ, "is_marlin_format": True}, "quantization_config.is_marlin_format' is True"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version' is 'gemv'"),
        ({**AWQ, "zero_point": False}, "quantization_config.zero_point' is False"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert' should be a list of names"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt' is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 20]}, "weight_block_size' is [128, 20], should be"),
        (packers.compressed("nvfp4-pack-quantized", INT4), "quantization_config.format' is 'nvfp4-pack-quantized'"),
        (packers.compressed("pack-quantized", {**INT4, "num_bits": 2}), "group_0.weights.num_bits' is 2"),
        (packers.compressed("pack-quantized", {**INT4, "group_size": 16}), "group_0.weights.group_size' is 16"),
        (packers.compressed("pack-quantized", {**INT4, "strategy": "token"}), "group_0.weights.strategy' is 'token'"),
        (
            packers.compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format' is 'sparse-24-bitmask'",
        ),
        (packers.compressed("dense", INT4, ignore=["re:(head"]), "ignore' has 're:(head', which is no regular"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "config_groups' should be an object"),
    ],
)
def test_variations_that_are_not_supported_are_refused_by_field(config: Any, message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read_scheme(Path("folder") / "config.json", config)
    assert str(caught.value).startswith("folder/config.json: field '")
    assert message in str(caught.value)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq", {f"{UP}.scales": torch.ones(3, 96).half()}, f"{UP}.scales' has shape [3, 96], should be [2, 96]"),
        ("gptq", {f"{UP}.qzeros": None}, f"{UP}.qzeros' is missing"),
        ("gptq", {f"{UP}.qweight": torch.ones(8, 96)}, f"{UP}.qweight' is F32 [8, 96], should be a matrix of I32"),
        ("gptq", {f"{UP}.qweight": torch.ones(9, 96).int()}, f"{UP}.scales' has shape"),
        ("awq", {f"{UP}.qzeros": torch.ones(2, 13).int()}, f"{UP}.qzeros' has shape [2, 13], should be [2, 12]"),
        ("awq", {f"{UP}.qweight": None}, f"'{UP}.weight' is missing"),
        ("fp8-blocks", {f"{UP}.weight_scale_inv": None}, f"{UP}.weight_scale' is missing"),
        ("fp8-blocks", {f"{UP}.weight": torch.ones(96, 64).char()}, f"{UP}.weight' is I8 [96, 64]"),
        ("compressed-int4", {f"{UP}.weight_shape": torch.tensor([96, 65])}, f"{UP}.weight_packed' has shape"),
        ("compressed-int8-zeros", {f"{UP}.weight_zero_point": None}, f"{UP}.weight_zero_point' is missing"),
        ("compressed-int8", {f"{UP}.weight": torch.ones(96, 64).short()}, "which is not int of 8 bits"),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_fit_are_refused_by_name(
    case: str, change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    make(case, tmp_path)
    tensors: dict[str, torch.Tensor | None] = load_file(tmp_path / "model.safetensors") | change
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_listed_module_is_dense_and_groups_of_unequal_size_are_refused(tmp_path: Path) -> None:
    make("gptq-v2-order", tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"]["modules_to_not_convert"] = ["mlp.up_proj"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(WeightsError, match=r"up_proj\.weight' is missing"):
        SafetensorsCheckpoint(tmp_path)
    make("gptq-v2-order", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.g_idx"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert isinstance(checkpoint.get("model.layers.1.mlp.up_proj.weight"), ScaledWeight)
    with pytest.raises(WeightsError, match=r"up_proj\.g_idx' does not divide 64 inputs into groups of 32"):
        checkpoint.get(f"{UP}.weight")
