"""Memory that every rank of a group can write: made in two steps, of which only the second is collective.

Source: torch.distributed._symmetric_memory. NVLink multicast is not needed and not used.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm import groups

#: torch's: "1" lets several ranks' memory be on one device. NCCL refuses that, and no multicast is set up there.
SHARE_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def may_share_devices() -> bool:
    """Whether ranks may share a device, for tests: by time slices, of which every wait for a peer takes some."""
    return os.environ.get(SHARE_VARIABLE) == "1"


class SymmetricMemory:
    """``size`` bytes on each rank.

    tensor  this rank's, as int32
    bases   addresses of each rank's, valid here (after ``connect``)
    table   address of those addresses in device memory, as int64
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """This rank's memory. Raises RuntimeError: there is not so much."""
        from torch._C._distributed_c10d import _SymmetricMemory

        self.tensor: torch.Tensor = _SymmetricMemory.empty_strided_p2p((size // 4,), (1,), torch.int32, device)
        self.bases: list[int] = []
        self.table = 0

    def connect(self, group: dist.ProcessGroup, name: str) -> None:
        """Exchange addresses. Collective. Raises RuntimeError: the ranks cannot reach each other's memory.

        name  the same on all ranks and never used before: torch remembers a group's store and ranks by name for ever, but
              process groups are destroyed and made anew under their old names
        """
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

        store = dist.PrefixStore(name, groups.store_of(group))
        _SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
        _register_process_group(name, group)  # type: ignore[arg-type,unused-ignore]
        try:
            self._handle: Any = _SymmetricMemory.rendezvous(self.tensor, name)
        finally:
            _unregister_process_group(name)  # type: ignore[arg-type,unused-ignore]
        self.bases = [int(address) for address in self._handle.buffer_ptrs]
        self.table = int(self._handle.buffer_ptrs_dev)

    def word_of(self, rank: int, offset: int) -> int:
        """The int32 at a byte offset of a rank's memory. Waits for the current stream."""
        return int(self._handle.get_buffer(rank, (1,), torch.int32, offset // 4).item())
