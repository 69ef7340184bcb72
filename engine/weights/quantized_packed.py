"""GPTQ and AWQ checkpoints: integer codes packed into the words of int32 tensors, under scales and zeros for groups of
inputs.

GPTQ packs `X.qweight` [K·b/32, N] along the inputs and `X.qzeros` [groups, N·b/32] along the outputs, the lowest bits
first. Its first format stores a zero less one. With `desc_act`, `X.g_idx` [K] names the group of every input, in no
order; the codes are put in the order of their groups here. AWQ packs both along the outputs, `X.qweight` [K, N/8], and
puts outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight into a word's halves of bytes, as its first kernel read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.quantized import Settings, Stored, expect, listed, module_of
from kernels.interface import ScaledWeight
from kernels.scaled import MIDDLE, pack_nibbles

_SCALES = ("F16", "BF16", "F32")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each four bits of a word, the lowest first."""


class GptqScheme:
    """See the head of this file."""

    def __init__(self, settings: Settings) -> None:
        """Raises WeightsError for a variation that is not supported."""
        self._bits: int = settings.choice("bits", (4, 8))
        self._group = group_size(settings, "group_size")
        settings.choice("desc_act", (False, True), False)
        # The first format stores zeros less one
        self._less = 1 if settings.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
        settings.refuse("dynamic", "is_marlin_format")
        self._dense = settings.names("modules_to_not_convert")
        self.name = f"gptq int{self._bits}"

    def shape(self, stored: Stored, name: str) -> tuple[int, ...] | None:
        """See Scheme."""
        module = module_of(name)
        found = stored.header(f"{module}.qweight")
        if found is None or listed(module, self._dense):
            return None
        if found[0] != "I32" or len(found[1]) != 2:
            raise stored.wrong(f"{module}.qweight", f"is {found[0]} {list(found[1])}, should be a matrix of I32")
        words = 32 // self._bits
        inputs, outputs = found[1][0] * words, found[1][1]
        groups = -(-inputs // (self._group or inputs))
        expect(stored, f"{module}.scales", _SCALES, (groups, outputs))
        expect(stored, f"{module}.qzeros", ("I32",), (groups, -(-outputs // words)))
        if stored.header(f"{module}.g_idx") is not None:
            expect(stored, f"{module}.g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """See Scheme."""
        module = module_of(name)
        codes = unpack_words(stored.tensor(f"{module}.qweight").T.contiguous(), self._bits)
        outputs, inputs = codes.shape
        group = self._group or inputs
        zeros = unpack_words(stored.tensor(f"{module}.qzeros"), self._bits)[:, :outputs]
        zeros = ((zeros + self._less) & (2**self._bits - 1)).T
        order = None
        if stored.header(f"{module}.g_idx") is not None:
            order = order_of_groups(stored, f"{module}.g_idx", group)
        scales = stored.tensor(f"{module}.scales").T.contiguous()
        return integers(codes if order is None else codes[:, order], scales, zeros, self._bits, group, order)


class AwqScheme:
    """See the head of this file."""

    name = "awq int4"

    def __init__(self, settings: Settings) -> None:
        """Raises WeightsError for a variation that is not supported."""
        settings.choice("w_bit" if "w_bit" in settings.data else "bits", (4,))
        self._group = group_size(settings, "q_group_size" if "q_group_size" in settings.data else "group_size")
        settings.choice("zero_point", (True,), True)
        settings.choice("version", ("gemm", "GEMM"), "gemm")
        self._dense = settings.names("modules_to_not_convert")

    def shape(self, stored: Stored, name: str) -> tuple[int, ...] | None:
        """See Scheme."""
        module = module_of(name)
        found = stored.header(f"{module}.qweight")
        if found is None or listed(module, self._dense):
            return None
        if found[0] != "I32" or len(found[1]) != 2:
            raise stored.wrong(f"{module}.qweight", f"is {found[0]} {list(found[1])}, should be a matrix of I32")
        inputs, outputs = found[1][0], found[1][1] * 8
        groups = -(-inputs // (self._group or inputs))
        expect(stored, f"{module}.scales", _SCALES, (groups, outputs))
        expect(stored, f"{module}.qzeros", ("I32",), (groups, outputs // 8))
        return outputs, inputs

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """See Scheme."""
        module = module_of(name)
        codes = _awq_columns(stored.tensor(f"{module}.qweight")).T.contiguous()
        zeros = _awq_columns(stored.tensor(f"{module}.qzeros")).T
        scales = stored.tensor(f"{module}.scales").T.contiguous()
        return integers(codes, scales, zeros, 4, self._group or codes.shape[1], None)


def group_size(settings: Settings, key: str) -> int:
    """Inputs of a group, a multiple of 32; 0 where each output has one scale (−1 in the file). Raises WeightsError."""
    value = settings.data.get(key)
    if type(value) is not int or (value != -1 and (value <= 0 or value % 32)):
        raise settings.wrong(key, f"is {value!r}, should be −1 or a multiple of 32")
    return max(value, 0)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] → codes uint8 [R, W·32/bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).reshape(words.shape[0], -1)


def integers(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, order: Tensor | None
) -> ScaledWeight:
    """Codes uint8 [N, K] and zeros [N, groups] of 4 or 8 bits, both from 0 upwards, as a ScaledWeight; zeros None: in
    the middle of the codes."""
    inputs = codes.shape[1]
    if bits == 4:
        if zeros is not None and bool((zeros == MIDDLE).all()):
            zeros = None
        held = None if zeros is None else zeros.to(torch.int8).contiguous()
        return ScaledWeight(pack_nibbles(codes), scales, "int4", inputs, group, held, order)
    moved = None if zeros is None else (zeros.to(torch.int16) - 128).to(torch.int8).contiguous()
    if moved is not None and not bool(moved.any()):
        moved = None
    return ScaledWeight((codes ^ 128).view(torch.int8), scales, "int8", inputs, group, moved, order)


def order_of_groups(stored: Stored, name: str, group: int) -> Tensor | None:
    """Inputs by their groups, int64 [K]; None where they are in order. Raises WeightsError for groups of unequal
    size."""
    index = stored.tensor(name).to(torch.int64)
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order], torch.arange(len(index)) // group):
        raise stored.wrong(name, f"does not divide {len(index)} inputs into groups of {group}")
    return None if torch.equal(order, torch.arange(len(index))) else order


def _awq_columns(words: Tensor) -> Tensor:
    """int32 [R, W] → codes uint8 [R, 8·W] in order."""
    codes = unpack_words(words, 4).reshape(words.shape[0], -1, 8)
    out = torch.empty_like(codes)
    out[..., list(AWQ_ORDER)] = codes
    return out.reshape(words.shape[0], -1)
