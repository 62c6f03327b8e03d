"""Which values are kept as this rank's rows and which whole, so that the fewest bytes move between ranks.

Of S bytes a rank sends (n-1)/n S in a reduce-scatter or an all-gather, and 2 (n-1)/n S in an all-reduce. A value that is
computed whole needs whole operands. One that is sharded is gathered once, if anything needs it whole; a whole one is
sharded for nothing, by reading some of its rows. Among placements that move equally little, the one that computes the least
whole wins. It is a minimum cut, whole values on the side of the source:

    value -> sink           cap: what it costs more to have it whole from the start (half an all-reduce, the computing)
    gathered -> value       cap: its gather; cut where the value is sharded, but a whole one is needed
    reader -> gathered      never cut: what is computed whole reads it whole
    source -> gathered      never cut: something that is not row-wise reads it

What then moves no fewer bytes and holds no norm stays as it is: an addition or a scale costs next to nothing whole, where
it is part of what comes after it, and there would be two collectives to start instead of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpfuse.graph.nodes import Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a region.

    row_bytes  bytes of one row of it; None: it cannot be gathered (several tensors at once, or one number for all columns)
    reduced    an all-reduce gives it: else it is computed from other values
    over_last  it is a reduction over the last dimension, as there is one in every norm
    readers    values that are computed from it row by row
    whole      something reads all rows of it
    """

    row_bytes: int | None
    reduced: bool
    over_last: bool
    readers: tuple[Node, ...]
    whole: bool


def sharded(values: Mapping[Node, Value]) -> set[Node]:
    """The values to keep as this rank's rows. The same answer for the same values, on every rank."""
    import networkx

    computing = sum(_computing(v) for v in values.values())
    byte = 2 * (1 + computing + len(values))  # moving one is worse than all computing and starting
    cut: Any = networkx.DiGraph()
    cut.add_nodes_from(("source", "sink"))
    index = {node: i for i, node in enumerate(values)}  # names that compare and hash alike in every process
    for node, v in values.items():
        here, gathered = index[node], -1 - index[node]
        if v.reduced:
            assert v.row_bytes is not None
            cut.add_edge(here, "sink", capacity=byte * v.row_bytes)
            cut.add_edge("source", here, capacity=1)  # two collectives to start instead of one
        else:
            cut.add_edge(here, "sink", capacity=2 * _computing(v))
        if v.row_bytes is None:
            cut.add_edge(gathered, here)
            cut.add_edges_from((here, index[reader]) for reader in v.readers)  # nor can some rows of it be read
        else:
            cut.add_edge(gathered, here, capacity=byte * v.row_bytes)
        for reader in v.readers:
            cut.add_edge(index[reader], gathered)
        if v.whole:
            cut.add_edge("source", gathered)
    _, (_, sink_side) = networkx.minimum_cut(cut, "source", "sink")
    return _worthwhile(values, {node for node in values if index[node] in sink_side})


def _worthwhile(values: Mapping[Node, Value], chosen: set[Node]) -> set[Node]:
    """Without the parts that move as many bytes as before and hold no norm."""
    import networkx

    connected: Any = networkx.Graph()
    connected.add_nodes_from(chosen)
    connected.add_edges_from((node, r) for node in chosen for r in values[node].readers if r in chosen)
    kept: set[Node] = set()
    for part in networkx.connected_components(connected):
        before = sum(2 * (values[node].row_bytes or 0) for node in part if values[node].reduced)
        after = before // 2
        for node in part:
            if values[node].whole or any(reader not in chosen for reader in values[node].readers):
                after += values[node].row_bytes or 0
        assert after <= before, "the cut was no minimum"
        if after < before or any(values[node].over_last for node in part):
            kept |= part
    return kept


def _computing(v: Value) -> int:
    return 0 if v.reduced else v.row_bytes or 1
