from __future__ import annotations

import gc
import weakref

import torch

from kernels.arena import ALIGNMENT, CHUNK, HUGE_PAGE, Arena


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 100, 5000, 7)]
    for index, piece in enumerate(pieces):
        piece.fill_(index + 1)
    assert all(piece.data_ptr() % ALIGNMENT == 0 for piece in pieces)
    assert [piece.shape[0] for piece in pieces] == [1, 64, 100, 5000, 7]
    assert all(bool((piece == index + 1).all()) for index, piece in enumerate(pieces))


def test_a_new_mapping_starts_on_a_huge_page_and_may_be_larger_than_a_chunk() -> None:
    arena = Arena()
    small, large = arena.take(10), arena.take(CHUNK + 2 * HUGE_PAGE)
    assert small.data_ptr() % HUGE_PAGE == 0
    assert large.data_ptr() % HUGE_PAGE == 0
    large[-1] = 9
    assert large.shape == (CHUNK + 2 * HUGE_PAGE,)
    assert int(large[-1]) == 9


def test_memory_lives_as_long_as_its_pieces() -> None:
    arena = Arena()
    piece = arena.take(10)
    piece.fill_(3)
    del arena
    gc.collect()
    assert torch.equal(piece, torch.full((10,), 3, dtype=torch.uint8))
    gone = weakref.ref(piece)
    del piece
    gc.collect()
    assert gone() is None
