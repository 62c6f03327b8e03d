"""Find the tensor-parallel process groups of a model from the model alone.

DTensor parameters (``parallelize_module``, Hugging Face ``tp_plan``) carry their device mesh: the groups are those of the
mesh dimensions that a parameter is sharded over. Hand-written layers usually keep their group, or mesh, as an attribute
with "tp" or "tensor" in its name (Megatron's ``tp_group``).
Where neither is so, the groups only become known from the collectives in the graph; that is no failure.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpfuse.errors import GroupError

_TENSOR_PARALLEL_NAME = re.compile(r"(?<![a-z])tp(?![a-z])|tensor", re.IGNORECASE)


def find_groups(model: torch.nn.Module) -> list[dist.ProcessGroup]:
    """Process groups that the model's layers name, in order of first appearance; empty if none does.

    Data-parallel dimensions are left out: a parameter that is only replicated over a mesh dimension says nothing about
    it, and FSDP's sharding (dim 0 of every parameter over its own mesh) is not told apart here, but costs no more than
    an exchange with ranks that call ``apply`` too.
    Raises GroupError: a mesh's group was destroyed. (A group that the model itself holds is given, whatever became of it.)
    """
    found: dict[str, dist.ProcessGroup] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if isinstance(tensor, DTensor):
                for dim, placement in enumerate(tensor.placements):
                    if isinstance(placement, Shard):
                        _add(found, _of_mesh(tensor.device_mesh, dim))
        for name, attribute in vars(module).items():
            if not _TENSOR_PARALLEL_NAME.search(name):
                continue  # a pipeline's or an expert's group: its ranks hold other modules
            if isinstance(attribute, dist.ProcessGroup):
                _add(found, attribute)
            elif isinstance(attribute, DeviceMesh) and attribute.ndim == 1:
                _add(found, _of_mesh(attribute, 0))
    return list(found.values())


def _of_mesh(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    try:
        return mesh.get_group(dim)
    except (RuntimeError, ValueError, KeyError) as error:
        raise GroupError(f"the model has a process group that was destroyed: {mesh} is of no use any more") from error


def _add(found: dict[str, dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    found.setdefault(group.group_name, group)
