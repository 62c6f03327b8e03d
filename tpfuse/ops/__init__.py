"""Fused operations, callable eagerly. Each file holds one: its meaning, schema, fake form and dispatch."""

from tpfuse.ops.all_reduce import all_reduce
from tpfuse.ops.all_reduce_rms_norm import all_reduce_rms_norm

__all__ = ["all_reduce", "all_reduce_rms_norm"]
