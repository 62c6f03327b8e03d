"""Process groups by name: graphs hold names, so that a compiled graph can outlive the object.

Nothing here falls back to the default group: a name that is unknown is an error.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name. Raises ValueError: there is none (any more)."""
    try:
        return c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"no process group named {name!r}: it was destroyed or never made") from error


def group_name(group: dist.ProcessGroup | str) -> str:
    """Name of a group, as graphs hold it."""
    if isinstance(group, str):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a ProcessGroup or the name of one, got {type(group).__name__}")
    return group.group_name


def size(group: dist.ProcessGroup | str) -> int:
    """Ranks in a group, or in the group of that name (which a compiler cannot trace)."""
    if isinstance(group, str):
        return resolve(group).size()
    group_name(group)  # or ValueError
    return group.size()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Key-value store that the ranks of the group share."""
    return c10d._get_process_group_store(group)


def has_peers(group: dist.ProcessGroup) -> bool:
    """Whether other processes stand behind the group: not for one rank, nor for a fake group in tests."""
    return group.size() > 1 and c10d._world.pg_map[group][0] != "fake"


def exists(group: dist.ProcessGroup) -> bool:
    """Whether the group has not been destroyed."""
    return group in c10d._world.pg_map
