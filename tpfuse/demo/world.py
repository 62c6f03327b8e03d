"""Ranks and their mesh."""

from __future__ import annotations

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GROUP_TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def replicas(self) -> int:
        return self._size("dp")

    @property
    def replica(self) -> int:
        return self._place("dp")

    @property
    def stages(self) -> int:
        return self._size("pp")

    @property
    def stage(self) -> int:
        return self._place("pp")

    def group(self, name: str) -> dist.ProcessGroup:
        return self.mesh.get_group(name)

    def _size(self, name: str) -> int:
        return self.mesh[name].size() if name in (self.mesh.mesh_dim_names or ()) else 1

    def _place(self, name: str) -> int:
        return self.mesh.get_local_rank(name) if name in (self.mesh.mesh_dim_names or ()) else 0

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def maximum(self, number: float) -> float:
        """The largest of all ranks' numbers, on every rank."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()


def start(device_type: str | None, sizes: dict[str, int] | None) -> World:
    """Make the default process group: NCCL where each local rank has a GPU of its own, gloo otherwise."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device_type is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        device_type = "cuda" if enough else "cpu"
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    used = {name: ranks for name, ranks in (sizes or {"tp": size}).items() if ranks > 1 or name == "tp"}
    mesh = init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    return World(rank, size, device, mesh)
