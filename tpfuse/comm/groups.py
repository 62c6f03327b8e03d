"""Process groups by name: graphs hold names, so that a compiled graph can outlive the object.

Nothing here falls back to the default group: a name that is unknown is an error.
"""

from __future__ import annotations

import contextlib
import datetime

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tpfuse.errors import GroupError


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name. Raises GroupError: there is none (any more)."""
    try:
        return c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"no process group named {name!r}: it was destroyed or never made") from error


def group_name(group: dist.ProcessGroup | str) -> str:
    """Name of a group, as graphs hold it. Raises GroupError: it is none."""
    if isinstance(group, str):
        return group
    check(group, "a ProcessGroup or the name of one")
    return group.group_name


def check(group: object, what: str = "a torch.distributed.ProcessGroup") -> None:
    """Raises GroupError: this is no process group, or one that this rank is not in."""
    if isinstance(group, dist.ProcessGroup):
        return
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(f"group must be {what}: this rank is not in the group that dist.new_group was called for")
    raise GroupError(f"group must be {what}, got {group!r}")


def check_device(name: str, device: torch.device) -> None:
    """Raises GroupError: the group of that name is gone, or has no backend for tensors on that device."""
    known = [each.type for each in resolve(name)._device_types]
    if device.type not in known and device.type != "meta":
        raise GroupError(f"group {name!r} carries tensors on {' and '.join(sorted(known))}, got one on {device}")


def size(group: dist.ProcessGroup | str) -> int:
    """Ranks in a group, or in the group of that name (which a compiler cannot trace)."""
    if isinstance(group, str):
        return resolve(group).size()
    group_name(group)  # or GroupError
    return group.size()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Key-value store that the ranks of the group share."""
    return c10d._get_process_group_store(group)


def timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long a collective of the group may take: the shortest of its backends'."""
    found = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend may have no options
            found.append(group._get_backend(device).options._timeout)
    return min(found) if found else dist.default_pg_timeout


def has_peers(group: dist.ProcessGroup) -> bool:
    """Whether other processes stand behind the group: not for one rank, nor for a fake group in tests."""
    return group.size() > 1 and c10d._world.pg_map[group][0] != "fake"


def exists(group: dist.ProcessGroup) -> bool:
    """Whether the group has not been destroyed."""
    return group in c10d._world.pg_map
