"""What users do to an applied model: switch it off, move, copy, store, load, extend and quantize it. Two CPU ranks.

Each time the applied model is compared with a copy of it, which is not applied; and, where modules were replaced, its
report with that of a model that was applied afterwards. Graphs are run by an interpreter, and one spawn does it all.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading

import pytest
import torch

import tpfuse
from tests.gloo.use import Int8RowParallel, Int8Weight, Lora, Model, fill, ids, quantized
from tpfuse import switch
from tpfuse.config import DEBUG_VARIABLE
from tpfuse.testing import interpret_graphs, spawn

pytestmark = pytest.mark.slow

FUSION = "fuse_allreduce_rms"
FP32 = 1e-5


def _model(**config) -> Model:
    return tpfuse.apply(Model(with_group=False), config or None, fullgraph=True)


def _call(model, count: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return model(ids(count))


def _error(model, count: int = 5) -> float:
    """Of an applied model, from its copy."""
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    return (_call(model, count) - _call(twin, count)).abs().max().item()


def _graphs(model) -> int:
    return tpfuse.explain(model).graphs


def _disabled() -> dict[str, object]:
    model = _model()
    plain = _call(copy.deepcopy(model))
    found: dict[str, object] = {}
    with tpfuse.disabled():
        found["inside"] = torch.equal(_call(model), plain) and _graphs(model) == 0
        with tpfuse.disabled():
            _call(model)
        _call(model)
        found["nested"] = _graphs(model) == 0
        seen = []
        other = threading.Thread(target=lambda: seen.append(switch.is_off()))
        other.start()
        other.join()
        found["this thread"] = seen == [False] and switch.is_off()
    _call(model)
    found["after"] = _graphs(model) == 1
    with pytest.raises(ZeroDivisionError), tpfuse.disabled():
        raise ZeroDivisionError
    found["after an error"] = not switch.is_off()

    @tpfuse.disabled()
    def decorated(depth: int) -> bool:
        return switch.is_off() and (depth == 0 or decorated(depth - 1)) and switch.is_off()

    found["decorator"] = decorated(2) and not switch.is_off()

    def outer(x):
        with tpfuse.disabled():
            return model(x)

    with torch.no_grad():
        compiled = torch.compile(outer, backend="eager", fullgraph=True)
        found["inside torch.compile"] = torch.allclose(compiled(ids(5)), plain, atol=FP32) and _graphs(model) == 1
    return found


def _disabled_on_one_rank(rank: int) -> str:
    os.environ[DEBUG_VARIABLE] = "1"
    try:
        model = tpfuse.apply(Model())
    finally:
        del os.environ[DEBUG_VARIABLE]
    with pytest.raises(tpfuse.AgreementError) as caught:
        if rank == 0:
            with tpfuse.disabled():
                _call(model)
        else:
            _call(model)
    return str(caught.value)


def _modes_of_gradients() -> dict[str, object]:
    model = _model()
    plain = _call(copy.deepcopy(model))
    ok = True
    for _ in range(3):
        ok = ok and torch.allclose(_call(model), plain, atol=FP32)
        with torch.inference_mode():
            leaf = model(ids(5))
            ok = ok and torch.allclose(leaf, plain, atol=FP32) and leaf.is_inference()
    return {"same": ok, "graphs": _graphs(model), "fused": tpfuse.explain(model).count(FUSION)}


def _moved() -> dict[str, object]:
    model = _model()
    found: dict[str, object] = {"fp32": _error(model)}
    model.to(torch.bfloat16)
    found["bf16"] = _error(model)
    found["bf16 dtype"] = _call(model).dtype is torch.bfloat16
    model.to(torch.float64)
    found["fp64"] = _error(model)
    found["fp64 told"] = any(site.reason == "dtype torch.float64" for site in tpfuse.explain(model).sites)
    model.to("cpu", torch.float32)
    before = _graphs(model)
    found["fp32 again"] = max(_error(model), _graphs(model) - before)  # nothing is compiled anew
    return found


def _copied() -> dict[str, object]:
    model = _model()
    keys, plain = list(model.state_dict()), _call(model)
    twin = copy.deepcopy(model)
    fill(twin, 9)
    own = (_call(tpfuse.apply(twin)) - _call(copy.deepcopy(twin))).abs().max().item()
    stored, whole = io.BytesIO(), io.BytesIO()
    torch.save(model, whole)
    torch.save(model.state_dict(), stored)
    loaded = torch.load(io.BytesIO(whole.getvalue()), weights_only=False)
    pickled = pickle.loads(pickle.dumps(model))
    fresh = Model(with_group=False)
    fill(fresh, 3)
    fresh.load_state_dict(torch.load(io.BytesIO(stored.getvalue())))
    return {
        "its own": own < FP32 and twin._compiled_call_impl is not model._compiled_call_impl,
        "original untouched": torch.equal(_call(model), plain),
        "stored": all(m._compiled_call_impl is None and _close(_call(m), plain) for m in (loaded, pickled, fresh)),
        "keys": [list(m.state_dict()) == keys for m in (model, twin, loaded, pickled)] == [True] * 4,
        "no trace": b"tpfuse" not in pickle.dumps(model),
    }


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=FP32)


def _weights() -> dict[str, object]:
    """Other weights, by every way there is: the next call has them, and nothing is compiled."""
    model = _model()
    before, found = _call(model), {}
    graphs = _graphs(model)

    def changed(name: str) -> None:
        nonlocal before
        found[name] = _error(model) < FP32 and (_call(model) - before).abs().max().item() > 1e-3
        before = _call(model)

    fill(model, 2)
    changed("copy_")
    with torch.inference_mode():
        model.layers[0].down.weight.data.mul_(1.5)
    changed("data, in inference mode")
    other = Model(with_group=False)
    fill(other, 4)
    model.load_state_dict(other.state_dict())
    changed("load_state_dict")
    fill(other, 5)
    model.load_state_dict(other.state_dict(), assign=True)
    changed("load_state_dict, assigned")
    model.layers[1].down.weight = torch.nn.Parameter(model.layers[1].down.weight.detach() * -1)
    changed("another Parameter")
    model.layers[0].norm.weight.data = model.layers[0].norm.weight.data * 3
    changed("other data")
    return {**found, "nothing compiled": _graphs(model) == graphs}


def _sites(model) -> list[tuple]:
    return sorted((s.where, s.op, s.outcome, s.reason) for s in tpfuse.explain(model).sites)


def _replaced(change, **config) -> dict[str, object]:
    """``change(model)`` after apply, before it, and taken back."""
    model = _model(**config)
    _call(model)
    twin = copy.deepcopy(model)
    undo = change(model)
    found: dict[str, object] = {"error": _error(model)}
    found["differs"] = (_call(model) - _call(twin)).abs().max().item() > 1e-3
    fresh = copy.deepcopy(model)
    tpfuse.apply(fresh, config or None, fullgraph=True)
    found["before apply"] = _error(fresh)
    found["report"] = _sites(model) == _sites(fresh) or (_sites(model), _sites(fresh))
    undo()
    found["taken back"] = (_call(model) - _call(twin)).abs().max().item()
    return found


def _swap_modules(kind):
    def change(model):
        before = [layer.down for layer in model.layers]
        for layer in model.layers:
            layer.down = kind(layer.down)

        def undo():
            for layer, base in zip(model.layers, before, strict=True):
                layer.down = base

        return undo

    return change


def _swap_parameters(model):
    before = [layer.down.weight for layer in model.layers]
    for layer in model.layers:
        layer.down.weight = torch.nn.Parameter(Int8Weight(*quantized(layer.down.weight)), requires_grad=False)

    def undo():
        for layer, weight in zip(model.layers, before, strict=True):
            layer.down.weight = weight

    return undo


def _run(rank: int) -> dict[str, object]:
    with interpret_graphs():
        return {
            "disabled": _disabled(),
            "disabled on one rank": _disabled_on_one_rank(rank),
            "modes": _modes_of_gradients(),
            "moved": _moved(),
            "copied": _copied(),
            "weights": _weights(),
            "lora": _replaced(_swap_modules(Lora)),
            "int8 modules": _replaced(_swap_modules(Int8RowParallel)),
            "int8 parameters": _replaced(_swap_parameters),
        }


@pytest.fixture(scope="module")
def ranks():
    return spawn(_run, 2, timeout_s=240)


def _all_true(found: dict[str, object]) -> None:
    assert found == dict.fromkeys(found, True)


def test_disabled(ranks):
    for found in ranks:
        _all_true(found["disabled"])


def test_disabled_on_one_rank_only(ranks):
    for found in ranks:
        assert "differ in tpfuse.disabled: rank 0: True, rank 1: False" in found["disabled on one rank"]


def test_inference_mode_beside_no_grad(ranks):
    for found in ranks:
        assert found["modes"]["same"] and found["modes"]["fused"] == 2
        assert found["modes"]["graphs"] <= 2


def test_another_dtype(ranks):
    for found in ranks:
        moved = found["moved"]
        assert moved["fp32"] < FP32 and moved["bf16"] < 0.06 and moved["fp64"] < 1e-12 and moved["fp32 again"] < FP32
        assert moved["bf16 dtype"] and moved["fp64 told"]


def test_copies_and_pickles(ranks):
    for found in ranks:
        _all_true(found["copied"])


def test_other_weights(ranks):
    for found in ranks:
        _all_true(found["weights"])


@pytest.mark.parametrize("change", ["lora", "int8 modules", "int8 parameters"])
def test_replaced_layers(ranks, change):
    for found in ranks:
        replaced = found[change]
        assert max(replaced[name] for name in ("error", "before apply", "taken back")) < FP32
        assert replaced["differs"] and replaced["report"] is True, replaced
