"""From how many rows of a call on a model's rows are sharded: as configured, as measured, or by rule.

Everything that this is decided from is the same on all ranks but the table, which may differ between machines: what comes
out is part of what ranks agree on when a model is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tpfuse import tables, tokens
from tpfuse.comm import groups
from tpfuse.config import FusionConfig, Resolved
from tpfuse.kernels import dispatch
from tpfuse.models.row_bytes import row_bytes

#: On GPUs without a measurement: from so many rows on GEMM kernels with collectives began to win on 2x H200.
RULE_ROWS = 512


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Where sharding begins.

    rows    ``sp_min_token_num`` for the variants of a model; None: rows are sharded whatever their number
    source  why, for the report; empty where nothing is ever sharded
    """

    rows: int | None
    source: str = ""


def threshold(
    config: FusionConfig,
    fusions: Mapping[str, Resolved],
    model: torch.nn.Module,
    found: Sequence[dist.ProcessGroup],
) -> Threshold:
    """Where sharding begins for a model with these tensor-parallel groups. Touches no process group."""
    given = config.sp_min_token_num
    if not fusions["enable_sp"].on:
        return Threshold(given)
    if given is not None:
        return Threshold(given, f"{_told(given)}, as configured")
    worlds = {group.size() for group in found if groups.exists(group)}
    if worlds == {1}:
        return Threshold(None)
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    device = tensor.device if tensor is not None else torch.device("cpu")
    rows, source = _measured(fusions["fuse_gemm_comms"].on, model, device, worlds)
    if rows is None and device.type == "cuda":
        return Threshold(RULE_ROWS, f"{_told(RULE_ROWS)}, by rule: {source}")
    return Threshold(rows, f"{_told(rows)}{', measured' if rows else ''}: {source}")


def _measured(gemm_comms: bool, model: torch.nn.Module, device: torch.device, worlds: set[int]) -> tuple[int | None, str]:
    """(by the machine's table, if it knows; where that is from, or why not)"""
    if len(worlds) != 1:
        return None, "its groups have different sizes" if worlds else "its process group is known from its graph only"
    size = row_bytes(model)
    if size is None:
        return None, "its hidden size is not known"
    machine = dispatch.machine_of(device, *worlds)
    table, source = tables.find(machine)
    known = table.sharded_from(tables.SEQUENCE_PARALLEL[gemm_comms], size) if table is not None else None
    if known is None:
        missing = "it has no measurement of sharded rows of this size: run tpfuse tune --sequence-parallel"
        return None, source if table is None else f"{source}; {missing}"
    fewest, at = known
    return int(min(fewest, tokens.MOST_ROWS)), f"{source}, for {at} bytes a row (here {size})"


def _told(rows: int | None) -> str:
    if rows is None:
        return "rows are sharded whatever their number"
    if rows >= tokens.MOST_ROWS:
        return "rows are not sharded"
    return f"rows are sharded from {rows} on"
