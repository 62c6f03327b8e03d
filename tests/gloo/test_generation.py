"""An applied Hugging Face model on two CPU ranks in every way to generate, and stored: tokens and files of the unfused one.

Graphs are run by an interpreter. What costs the minutes is Dynamo, as under ``torch.compile``: decoding with several beams,
or with a draft model, makes calls of other shapes than plain decoding does.
"""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tpfuse
from tpfuse.models.families import build, build_sharded, family_config
from tpfuse.testing import interpret_graphs, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FUSION = "fuse_allreduce_rms"
#: Ways to generate, by arguments of ``generate``. "assisted" has a draft model.
WAYS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "assisted": {},
}


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _config():
    return family_config("llama", num_hidden_layers=1)


def _ids(length: int = 9) -> torch.Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(5))


def _generate(model, length: int = 9, **kwargs) -> torch.Tensor:
    torch.manual_seed(11)
    kwargs = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **kwargs}
    return model.generate(_ids(length), **kwargs)


def _ways(model, draft, length: int = 9) -> dict[str, torch.Tensor]:
    helped = {"assistant_model": draft}
    return {
        way: _generate(model, length, **kwargs, **(helped if way == "assisted" else {})) for way, kwargs in WAYS.items()
    }


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {way: torch.equal(tokens, expected[way]) for way, tokens in found.items()}


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(_ids(), use_cache=False).logits


def _graphs(*models) -> list[int]:
    return [tpfuse.explain(model).graphs for model in models]


def _generated(rank: int) -> dict[str, object]:
    with interpret_graphs():
        model, draft = (build_sharded(_config(), _mesh(), torch.float32, seed) for seed in (0, 1))
        expected = {length: _ways(model, draft, length) for length in (9, 12)}
        found: dict[str, object] = {
            "ways differ": len({tuple(tokens[0].tolist()) for tokens in expected[9].values()}) > 1,
            "by a copy": torch.equal(_generate(copy.deepcopy(model)), expected[9]["greedy"]),
        }
        tpfuse.apply(model)
        tpfuse.warmup(model, [9], call=lambda length: _generate(model, length))
        before = _graphs(model)
        found["warmed up"] = torch.equal(_generate(model), expected[9]["greedy"]) and before == _graphs(model) != [0]
        with_plain_draft = _generate(model, assistant_model=draft)
        found["draft as it was"] = torch.equal(with_plain_draft, expected[9]["assisted"])
        tpfuse.apply(draft)
        found["tokens"] = _equal(_ways(model, draft), expected[9])
        found["fused"] = [tpfuse.explain(each).count(FUSION) for each in (model, draft)]
        sites = [site for each in (model, draft) for site in tpfuse.explain(each).sites if site.op == "all_reduce"]
        found["left"] = [site.reason for site in sites if site.outcome == "skipped"]
        graphs = _graphs(model, draft)
        found["tokens again"] = _equal(_ways(model, draft), expected[9])
        found["nothing compiled again"] = _graphs(model, draft) == graphs
        found["tokens, another length"] = _equal(_ways(model, draft, 12), expected[12])
        graphs = _graphs(model, draft)
        with tpfuse.disabled():
            found["tokens, disabled"] = _equal(_ways(model, draft, 12), expected[12])
        found["disabled compiles nothing"] = _graphs(model, draft) == graphs
        found["graphs"] = graphs
    return found


def test_generation():
    for found in spawn(_generated, 2, timeout_s=880):
        told = {name: value for name, value in found.items() if name.startswith("tokens")}
        assert told == dict.fromkeys(told, dict.fromkeys(WAYS, True))
        assert found["ways differ"] and found["by a copy"] and found["warmed up"] and found["draft as it was"]
        assert found["fused"] == [2, 2] and found["left"] == []
        assert found["nothing compiled again"] and found["disabled compiles nothing"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    placed = all(getattr(a[n], "placements", None) == getattr(b[n], "placements", None) for n in a if n in b)
    return list(a) == list(b) and placed and all(torch.equal(_local(a[name]), _local(b[name])) for name in a)


def _stored(rank: int, folder: pathlib.Path) -> dict[str, object]:
    from safetensors.torch import load_file

    def save(name: str) -> dict[str, torch.Tensor]:
        model.save_pretrained(folder / name)  # of every rank, for all shards are gathered; the first one writes
        files = sorted((folder / name).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    with interpret_graphs():
        model, whole = build_sharded(_config(), _mesh(), torch.float32), build(_config(), "cpu", torch.float32)
        logits, state = _logits(model), copy.deepcopy(model.state_dict())
        plain = save("plain")
        tpfuse.apply(model, strict=True)
        found = {"fused": torch.allclose(_logits(model), logits, atol=1e-5)}
        applied = save("applied")
        found["files"] = plain.keys() == applied.keys() and all(torch.equal(plain[n], applied[n]) for n in plain)
        found["whole"] = all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in applied.items())
        found["state_dict"] = _same(model.state_dict(), state)
        loaded = build_sharded(folder / "applied", _mesh(), torch.float32)
        found["loaded"] = _same(loaded.state_dict(), state) and torch.equal(_logits(loaded), logits)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        found["changed"] = not torch.allclose(_logits(model), logits, atol=1e-2)
        model.load_state_dict(loaded.state_dict())
        found["loaded into"] = _same(model.state_dict(), state) and torch.allclose(_logits(model), logits, atol=1e-5)
        found["no graph more"] = tpfuse.explain(model).graphs == 1
        found["configuration"] = "distributed" not in (folder / "applied" / "config.json").read_text()
    return found


def test_storing(tmp_path):
    for found in spawn(_stored, 2, tmp_path, timeout_s=280):
        assert found == dict.fromkeys(found, True)
