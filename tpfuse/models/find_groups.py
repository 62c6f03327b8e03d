"""Find the tensor-parallel process groups of a model from the model alone.

DTensor parameters (``parallelize_module``, Hugging Face ``tp_plan``) carry their device mesh: the groups are those of the
mesh dimensions that a parameter is sharded over. Hand-written layers usually keep their group, or mesh, as an attribute
with "tp" or "tensor" in its name (Megatron's ``tp_group``), or a mesh that has a dimension of such a name.
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

    Data-parallel dimensions are left out: those that parameters are only replicated over, and, where a parameter's mesh
    has a dimension of such a name, all others (FSDP's sharding). Without names FSDP's are not told apart, but cost no more
    than an exchange with ranks that call ``apply`` too.
    Raises GroupError: a mesh's group was destroyed. (A group that the model itself holds is given, whatever became of it.)
    """
    found: dict[str, dist.ProcessGroup] = {}
    tensors = [each for each in (*model.parameters(), *model.buffers()) if isinstance(each, DTensor)]
    any_named = any(_named(each.device_mesh) for each in tensors)
    for tensor in tensors:
        mesh = tensor.device_mesh
        for dim in _named(mesh) if any_named else range(mesh.ndim):
            if isinstance(tensor.placements[dim], Shard):
                _add(found, _of_mesh(mesh, dim))
    for module in model.modules():
        for name, attribute in vars(module).items():
            # Without such a name it may be a pipeline's or an expert's: its ranks hold other modules.
            named = bool(_TENSOR_PARALLEL_NAME.search(name))
            if named and isinstance(attribute, dist.ProcessGroup):
                _add(found, attribute)
            elif isinstance(attribute, DeviceMesh):
                for dim in _named(attribute) or ([0] if named and attribute.ndim == 1 else []):
                    _add(found, _of_mesh(attribute, dim))
    return list(found.values())


def _named(mesh: DeviceMesh) -> list[int]:
    """Dimensions of the mesh that are tensor parallel by their name."""
    return [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if _TENSOR_PARALLEL_NAME.search(name)]


def _of_mesh(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    try:
        return mesh.get_group(dim)
    except (RuntimeError, ValueError, KeyError) as error:
        raise GroupError(f"the model has a process group that was destroyed: {mesh} is of no use any more") from error


def _add(found: dict[str, dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    found.setdefault(group.group_name, group)
