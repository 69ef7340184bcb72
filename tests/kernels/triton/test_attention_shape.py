"""The choice of tiles: pure, within every architecture's shared memory, one for all in deterministic mode."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.architecture import Architecture, architecture
from kernels.triton.attention_shape import (
    AttentionShape,
    choose_tile,
    compiled_shapes,
    compiled_tiles,
    power_of_two,
    shared_estimate,
)

EVERY = [Architecture(capability, 100) for capability in (80, 86, 87, 89, 90, 100, 103, 120)]


@pytest.mark.parametrize("arch", EVERY, ids=lambda arch: str(arch.capability))
def test_tiles_fit_and_cover_every_head(arch: Architecture) -> None:
    for shape in compiled_shapes():
        for tokens in (1, 64, 65, 512, 513, 2047, 2048, 8192):
            tile = choose_tile(arch, shape, tokens)
            assert shared_estimate(tile, shape, arch) <= arch.shared_bytes
            assert tile.block_m == power_of_two(tile.block_m) >= 16
            assert tile.block_q(shape.group) * tile.heads(shape.group) <= tile.block_m
            assert shape.head_tiles(tile) * tile.heads(shape.group) >= shape.group


@pytest.mark.parametrize("arch", EVERY, ids=lambda arch: str(arch.capability))
def test_one_tile_for_all_steps_when_deterministic(arch: Architecture) -> None:
    for shape in compiled_shapes():
        tiles = {
            choose_tile(arch, shape, tokens, decode=decode, deterministic=True)
            for tokens in (1, 100, 1000, 5000)
            for decode in (False, True)
        }
        assert len(tiles) == 1


def test_more_rows_take_larger_tiles_and_decodes_small_ones() -> None:
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16)
    hopper = Architecture(90, 132)
    assert [choose_tile(hopper, shape, tokens).block_m for tokens in (1, 256, 1024, 4096)] == [16, 32, 64, 128]
    assert choose_tile(hopper, shape, 256, decode=True) == choose_tile(hopper, shape, 1)


def test_the_table_holds_every_choice_of_the_compiled_architectures() -> None:
    for shape in compiled_shapes():
        table = dict(compiled_tiles(shape))
        for capability in (80, 90, 100):
            for tokens in range(1, 4097, 61):
                tile = choose_tile(Architecture(capability, 132), shape, tokens)
                assert table[tile] <= capability


def test_a_cpu_stands_in_for_hopper() -> None:
    assert architecture(torch.device("cpu")).capability == 90
