"""MXFP4 checkpoints, as gpt-oss has them: `X_blocks` uint8 [..., N, K/32, 16] and `X_scales` uint8 [..., N, K/32] for a
tensor X [..., N, K] whose last dimension is the inputs."""

from __future__ import annotations

from engine.weights.quantized import Settings, Stored, expect, listed, module_of
from kernels.interface import ScaledWeight
from kernels.mxfp4 import MX_BLOCK


class Mxfp4Scheme:
    """See the head of this file."""

    name = "mxfp4"

    def __init__(self, settings: Settings) -> None:
        """Raises WeightsError for a list that is none."""
        self._dense = settings.names("modules_to_not_convert")

    def shape(self, stored: Stored, name: str) -> tuple[int, ...] | None:
        """See Scheme."""
        found = stored.header(f"{name}_blocks")
        if found is None or listed(module_of(name), self._dense):
            return None
        kind, shape = found
        if kind != "U8" or len(shape) < 3 or shape[-1] != MX_BLOCK // 2:
            raise stored.wrong(f"{name}_blocks", f"is {kind} {list(shape)}, should be U8 [..., N, K/32, 16]")
        expect(stored, f"{name}_scales", ("U8",), shape[:-1])
        return (*shape[:-2], shape[-2] * MX_BLOCK)

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """See Scheme."""
        codes, scales = stored.tensor(f"{name}_blocks"), stored.tensor(f"{name}_scales")
        inputs = scales.shape[-1] * MX_BLOCK
        return ScaledWeight(
            codes.reshape(-1, inputs // 2), scales.reshape(-1, scales.shape[-1]), "mxfp4", inputs, MX_BLOCK
        )
