"""tpfuse learns nothing about symbols: as many graphs, and the same conditions on them, as without it."""

from __future__ import annotations

import pytest
import torch

from tests.unit import norms
from tests.unit.graphs import Backend, PlainBackend, all_reduce, all_reduce_in_place, assert_same, values, world

D = 16
ROWS = (8, 1, 2, 3, 5, 7, 64, 129, 1000)  # those of the promise: one applied model takes them all


@pytest.fixture(autouse=True)
def two_ranks():
    with world(2) as group:
        yield group


def _flat(x, r, w):
    y = r + all_reduce(x)
    return norms.llama(y, w, 1e-5), y


def _views(x, r, w):
    y = r + all_reduce(x.reshape(-1, D)).view(x.shape)
    return norms.gemma(y.reshape(-1, D), w, 1e-5), y


def _merged(x, r, w):
    y = r + (all_reduce(x.reshape(-1, D)).view(x.shape) + all_reduce(x * 2))
    return norms.llama(y, w, 1e-5), y


def _in_place_with_bias(x, r, w):
    y = all_reduce_in_place(x * 1) + w
    y = r + y * 0.22
    return norms.llama(y, w, 1e-5).float(), y


def _near_miss(x, r, w):
    y = torch.relu(all_reduce(x)) + r
    return norms.llama(y, w, 1e-5), y


def _row_residual(x, r, w):
    y = all_reduce(x) + r[:1]
    return norms.llama(y, w, 1e-5), y


FUNCTIONS = (_flat, _views, _merged, _in_place_with_bias, _near_miss, _row_residual)
FUSES = {_flat: True, _views: True, _merged: True, _in_place_with_bias: True, _near_miss: False, _row_residual: None}


def _inputs(shape):
    return values(*shape), values(*shape, seed=1), values(D, seed=2)


def _run_all(function, shapes, backend, dynamic, mark):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    for shape in shapes:
        inputs = _inputs(shape)
        if mark:
            for tensor in inputs[:2]:
                torch._dynamo.mark_dynamic(tensor, mark - 1)
        assert_same(compiled(*inputs), function(*_inputs(shape)))
    return backend


def _hold_equal(function, shapes, dynamic=None, mark=0):
    ours = _run_all(function, shapes, Backend(), dynamic, mark)
    plain = _run_all(function, shapes, PlainBackend(), dynamic, mark)
    assert len(ours.graphs) == len(plain.graphs)
    assert ours.guards == plain.guards
    if FUSES[function] is not None:  # with one row the row residual has the value's shape
        assert (ours.recorder.report().count("fuse_allreduce_rms") > 0) == FUSES[function]
    return ours


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_automatic(function):
    """Every row count of the issue through one callable: the first static, the second dynamic, T = 1 by itself."""
    _hold_equal(function, [(rows, D) for rows in ROWS])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_dynamic_from_the_start(function):
    _hold_equal(function, [(2, 6, D), (3, 5, D), (4, 129, D), (7, 2, D)], dynamic=True)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_marked_dynamic(function):
    """mark_dynamic raises if anything specialises the dimension."""
    ours = _hold_equal(function, [(rows, D) for rows in ROWS if rows > 1], mark=1)
    assert len(ours.graphs) == 1


@pytest.mark.parametrize("function", [_flat, _views, _merged], ids=lambda f: f.__name__)
def test_marked_sequence_dimension(function):
    """[B, S, D] with a batch of 2: flattened rows are 2 * s."""
    ours = _hold_equal(function, [(2, rows, D) for rows in ROWS if rows > 1], mark=2)
    assert len(ours.graphs) == 1


def test_static():
    ours = _hold_equal(_flat, [(rows, D) for rows in (1, 2, 3, 2, 1)], dynamic=False)
    assert len(ours.graphs) == 3
    assert ours.recorder.report().count("fuse_allreduce_rms") == 1  # one place, however often it was compiled


def test_begins_and_ends_with_one_row():
    """cases.md 23: T = 1, then 1000, then 1."""
    _hold_equal(_flat, [(1, D), (1000, D), (1, D)])


def _norm_of_everything(x, r, w):
    y = r + all_reduce(x)
    return norms.without_weight(y.reshape(1, -1), None, 1e-5), y


@pytest.mark.parametrize("function", [_flat, _norm_of_everything], ids=lambda f: f.__name__)
def test_hidden_size_may_be_dynamic_too(function):
    """Neither specialised nor compared with anything: whether two symbols are equal must not be asked."""
    backends = Backend(), PlainBackend()
    for backend in backends:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
        for rows, hidden in ((4, 16), (6, 24), (5, 100)):
            inputs = values(rows, hidden), values(rows, hidden, seed=1), values(hidden, seed=2)
            assert_same(compiled(*inputs), function(*inputs))
    assert [len(backend.graphs) for backend in backends] == [1, 1]
    assert backends[0].guards == backends[1].guards


def test_symbols_of_two_tensors_are_not_identified():
    """x and r have rows of their own symbols; the addition already makes them equal, and nothing more is needed."""
    ours = _hold_equal(_flat, [(5, D), (9, D)], dynamic=True)
    assert len(ours.graphs) == 1
