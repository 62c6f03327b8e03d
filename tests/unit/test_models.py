"""What is known of models: gradient hooks, process groups, and the number of tokens of a call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tpfuse
from tpfuse import tokens
from tpfuse.demo.stages import split
from tpfuse.models import grad_hooks
from tpfuse.models.families import build, family_config
from tpfuse.models.find_groups import find_groups
from tpfuse.testing import fake_world, interpret_graphs

# -- gradient hooks ----------------------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


def _hooked():
    """A model whose first part has a full-backward hook, the second one a forward hook as well; and what they saw."""
    model = torch.nn.Sequential(Doubled(), Doubled(), torch.nn.Linear(3, 3))
    seen = []
    model[0].register_full_backward_hook(lambda *_: seen.append("backward of 0"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward of 1"))
    model[1].register_forward_hook(lambda *_: seen.append("forward of 1"))
    return model, seen


def test_only_gradient_hooks_are_stepped_around():
    model, _ = _hooked()
    assert grad_hooks.bypass(model) == [model[0]]


def test_hooks_fire_with_gradients_on():
    model, seen = _hooked()
    bypassed = grad_hooks.bypass(model)
    x = torch.ones(1, 3, requires_grad=True)
    model(x).sum().backward()
    assert sorted(seen) == ["backward of 0", "backward of 1", "forward of 1"]
    seen.clear()
    with torch.no_grad():
        assert torch.equal(model(x), model[2](4 * x))
    assert seen == ["forward of 1"]
    grad_hooks.restore(bypassed)
    assert all(module._compiled_call_impl is None for module in model.modules())
    model(x).sum().backward()
    assert "backward of 0" in seen


def test_a_hook_breaks_the_graph_and_the_bypass_does_not():
    model, _ = _hooked()
    part = torch.nn.Sequential(model[0], model[2])
    with torch.no_grad():
        with pytest.raises(Exception, match="hook"):
            torch.compile(part, backend="eager", fullgraph=True)(torch.ones(1, 3))
        torch._dynamo.reset()
        grad_hooks.bypass(part)
        assert torch.equal(torch.compile(part, backend="eager", fullgraph=True)(torch.ones(1, 3)), part(torch.ones(1, 3)))
    torch._dynamo.reset()


def test_a_module_that_is_compiled_already_is_left_alone():
    model, _ = _hooked()
    model[0].compile(backend="eager")
    mine = model[0]._compiled_call_impl
    assert grad_hooks.bypass(model) == [] and model[0]._compiled_call_impl is mine


# -- groups ------------------------------------------------------------------------------------------------------------


def _names(model):
    return [group.group_name for group in find_groups(model)]


def test_no_groups():
    assert find_groups(torch.nn.Linear(2, 2)) == []
    with fake_world(4):
        assert find_groups(torch.nn.Linear(2, 2)) == [], "WORLD is nobody's group by assumption"


def test_group_of_sharded_parameters():
    """The dimension that something is sharded over, not the one it is replicated over."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for linear in model:
            sharded = distribute_tensor(linear.weight.data, mesh, [Replicate(), Shard(0)])
            linear.weight = torch.nn.Parameter(sharded)
        assert _names(model) == [mesh.get_group("tp").group_name]
        model[1].weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()]))
        model[0].weight = torch.nn.Parameter(torch.ones(4, 4))
        assert _names(model) == []


def test_groups_kept_as_attributes():
    with fake_world(4):
        first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (4,))
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
        model[0].tp_group, model[1].pp_group, model[2].tp_group, model[3].tensor_mesh = first, second, first, mesh
        assert _names(model) == [first.group_name, mesh.get_group().group_name]  # a pipeline's ranks hold other modules


def test_groups_of_meshes_with_names():
    """A dimension that is tensor parallel by its name, also of a mesh that no attribute calls so; FSDP's is another."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh.get_group("tp").group_name
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].device_mesh = mesh
        assert _names(model) == [tp]
        model[0].device_mesh = mesh["dp"]
        assert _names(model) == []
        model[0].weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
        model[1].weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["dp"], [Shard(0)]))
        assert _names(model) == [tp]
        model[0].weight = torch.nn.Parameter(torch.ones(4, 4))
        assert _names(model) == [mesh.get_group("dp").group_name], "no name tells which it is"


# -- stages of a pipeline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "layers", "count"), [("llama", 3, 2), ("granite", 2, 2), ("gemma3", 3, 3)])
def test_stages_are_the_model(family, layers, count):
    config = family_config(family, num_hidden_layers=layers)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    parts = [split(build(config, "cpu", torch.float32), stage, count) for stage in range(count)]
    with torch.no_grad():
        expected, x = build(config, "cpu", torch.float32)(ids, use_cache=False).logits, ids
        for part in parts:
            x = part(x)
    assert (x - expected).abs().max() < 1e-6
    numbers = [{name.split(".")[3] for name, _ in part.named_parameters() if ".layers." in name} for part in parts]
    assert sorted(number for each in numbers for number in each) == [str(number) for number in range(layers)]
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1 and len(numbers[0]) >= len(numbers[-1])


@pytest.mark.parametrize(("stage", "count"), [(0, 3), (2, 2), (-1, 2)])
def test_stages_that_cannot_be(stage, count):
    with pytest.raises(ValueError, match=f"stage {stage} of {count} cannot be had of a model of 2 layers"):
        split(build(family_config("llama"), "cpu", torch.float32), stage, count)


# -- tokens ------------------------------------------------------------------------------------------------------------


def _forward(input_ids=None, inputs_embeds=None, mask=None, **kwargs):
    pass


IDS, EMBEDS = torch.zeros(2, 7, dtype=torch.long), torch.zeros(3, 5, 16)


@pytest.mark.parametrize(
    ("args", "kwargs", "name", "expected"),
    [
        ((IDS,), {}, None, 14),
        ((EMBEDS,), {}, None, 15),
        ((), {"mask": EMBEDS, "input_ids": IDS}, None, 14),
        ((), {"mask": IDS, "inputs_embeds": EMBEDS}, None, 15),
        ((None,), {"mask": IDS}, None, 14),
        ((IDS, EMBEDS), {}, "inputs_embeds", 15),
        ((), {"input_ids": IDS, "pixels": EMBEDS}, "pixels", 15),
        ((torch.zeros(0, 16),), {}, None, 0),
        ((torch.zeros(7, dtype=torch.int32),), {}, None, 7),
    ],
    ids=range(9),
)
def test_count_tokens(args, kwargs, name, expected):
    """All dimensions of integers, all but the last of floats."""
    assert tokens.count_tokens(_forward, args, kwargs, name) == expected


def test_no_tokens_to_count():
    with pytest.raises(ValueError, match="token_count_from"):
        tokens.count_tokens(_forward, (None, 3), {}, None)
    with pytest.raises(ValueError, match="'mask'"):
        tokens.count_tokens(_forward, (IDS,), {}, "mask")


def test_row_ranges():
    assert tokens.row_range((), 0) == (1, tokens.MOST_ROWS)
    assert [tokens.row_range((64, 256), i) for i in range(3)] == [(1, 63), (64, 255), (256, tokens.MOST_ROWS)]


def test_variant_names():
    assert tokens.variant_name((), 0) == "all"
    assert [tokens.variant_name((64, 256), i) for i in range(3)] == ["rows<64", "64<=rows<256", "rows>=256"]


# -- life ---------------------------------------------------------------------------------------------------------------


def test_an_applied_model_is_freed():
    """Dynamo keeps backends for ever; they must not keep the model."""
    with fake_world(2) as group, interpret_graphs(), torch.no_grad():
        for remove in (True, False):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
            tpfuse.apply(model, group=group)(torch.randn(2, 4))
            reference = weakref.ref(model)
            if remove:
                tpfuse.remove(model)
            del model
            gc.collect()
            assert reference() is None


def test_destroyed_group_is_told():
    with fake_world(2) as group:
        pass
    with fake_world(2), pytest.raises(tpfuse.ConfigError, match="was destroyed"):
        tpfuse.apply(torch.nn.Linear(2, 2), group=group)
