"""How many blocks and threads a launch of our kernels gets."""

from __future__ import annotations

import pytest

from tpfuse.kernels.layout import Layout, layout, pieces
from tpfuse.tables import Choice

ANY = Choice("any")


def ring(rows, vectors, choice=ANY, slots=512):
    return layout(rows, vectors, 1, slots, 132, choice)


def split(rows, vectors, choice=ANY):
    return layout(rows, vectors, 4, 32, 132, choice)


def test_by_rule():
    assert split(3, 512) == Layout(128, 4, 12, None) and split(1, 1024) == Layout(256, 8, 4, None)
    assert ring(64, 512) == Layout(512, 8, 64, None) and ring(1000, 1024) == Layout(1024, 16, 264, None)
    assert ring(1000, 2048) == Layout(2048, 16, 264, None)


@pytest.mark.parametrize("vectors", [1, 2, 7, 31, 32, 33, 360, 512, 1000, 2048])
@pytest.mark.parametrize("warps", [None, 1, 4, 8, 16, 32])
def test_no_thread_without_a_vector(vectors, warps):
    for laid in (ring(5, vectors, Choice("any", warps=warps)), split(5, vectors, Choice("any", warps=warps))):
        assert laid.vectors >= 32 * laid.warps and laid.vectors_per_thread >= 1
        assert laid.vectors & (laid.vectors - 1) == 0 and laid.warps & (laid.warps - 1) == 0
    assert ring(5, vectors).vectors >= vectors and 4 * split(5, vectors).vectors >= vectors


def test_blocks_of_a_ring():
    """No more than rows, than the arena has slots for, than asked for."""
    assert ring(7, 512).blocks == 7
    assert ring(7000, 512, slots=55).blocks == 55
    assert ring(7000, 512, Choice("any", blocks=100)).blocks == 100


def test_a_bound_that_is_none():
    assert ring(9, 1024, Choice("any", warps=16, registers=64)).registers == 64
    assert ring(9, 1024, Choice("any", warps=32, registers=64)).registers is None  # 64 each is all there are


def test_pieces_cover_a_message():
    assert pieces(1) == (1, 1) and pieces(512) == (1, 512) and pieces(513) == (2, 512)
    for vectors in (3, 511, 1024, 1025, 99999):
        rows, per_row = pieces(vectors)
        assert (rows - 1) * per_row < vectors <= rows * per_row
