"""What the passes over one graph share: the configuration, where nodes stand in the model, and what was decided."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from torch.fx import Graph

from tpfuse.config import Resolved
from tpfuse.graph.nodes import ALL_GATHER, ALL_REDUCE, ORDER, OTHER_ALL_REDUCES, REDUCE_SCATTER, WHERE, Node, is_call
from tpfuse.graph.places import Places
from tpfuse.kernels.candidates import ANY, Wish
from tpfuse.report import Outcome, Recorder, Site
from tpfuse.tokens import MOST_ROWS

#: The field of FusionConfig that norms are raised, all-reduces merged and both fused for.
FUSION = "fuse_allreduce_rms"
#: The one that rows are sharded for.
SEQUENCE_PARALLEL = "enable_sp"
#: The one that joins GEMMs and the collectives next to them.
GEMM_COMMS = "fuse_gemm_comms"
#: Those that quantise what a norm, or a gated activation, gives.
NORM_QUANT, ACT_QUANT = "fuse_norm_quant", "fuse_act_quant"
#: The one that normalises and rotates heads.
QK_NORM_ROPE = "enable_qk_norm_rope_fusion"
#: The one that rotates heads and writes them into the caches.
ROPE_KVCACHE = "fuse_rope_kvcache"
#: Those that normalise two tensors at once, and that pad what a norm gives.
DUAL_NORM, ACT_PADDING = "fuse_mla_dual_rms_norm", "fuse_act_padding"
#: Why a collective is left alone where ``Context.ranks_alike`` is false.
NOT_ALIKE = "ranks have different graphs or forward hooks"


class Context:
    """State of one run of the pipeline over one graph.

    ranks_alike  whether the ranks of its groups have the same graph: else only what changes no collective may be done
    rows         the fewest and the most rows of a call
    sp_min_rows  rows from which they may be sharded; None: any number
    replicated   by group: inputs of the graph that are known to be no shards of weights
    batch_invariant  only what computes a row alike in any batch may be put in
    rope_kvcache_rows  the most rows of a call whose heads are rotated and written into the caches at once
    unlike       by group: nodes that are known to have other constants on other ranks, or inputs other values
    """

    def __init__(
        self,
        fusions: Mapping[str, Resolved],
        recorder: Recorder,
        variant: str,
        places: Places,
        ranks_alike: bool,
        wish: Wish = ANY,
        rows: tuple[int, int] = (1, MOST_ROWS),
        sp_min_rows: int | None = None,
        replicated: Mapping[str, set[Node]] | None = None,
        unlike: Mapping[str, set[Node]] | None = None,
        batch_invariant: bool = False,
        rope_kvcache_rows: int = 256,
    ) -> None:
        self.fusions = fusions
        self.ranks_alike, self.batch_invariant = ranks_alike, batch_invariant
        self.rope_kvcache_rows = rope_kvcache_rows
        self.wish, self.rows, self.sp_min_rows = wish, rows, sp_min_rows
        self.replicated, self.unlike = replicated or {}, unlike or {}
        self.variant = variant
        self.rewrites = 0
        self.look_alikes: dict[Node, tuple[str, str]] = {}  # what a look-alike normalises -> (op, reason)
        self._recorder, self._places = recorder, places
        self._decisions: list[tuple[Node, Site]] = []

    def locate(self, graph: Graph) -> None:
        """Note where every node stands, in the graph and in the model, before anything moves."""
        seen: dict[tuple[str, ...], int] = {}
        for order, node in enumerate(graph.nodes):
            node.meta[ORDER] = order
            if is_call(node, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, *OTHER_ALL_REDUCES):
                places = self._places.of(node)
                nth = seen[places] = seen.get(places, 0) + 1
                node.meta[WHERE] = places if nth == 1 else tuple(f"{place}#{nth}" for place in places)

    def decide(
        self,
        outcome: Outcome,
        node: Node,
        *,
        fusion: str,
        op: str = "all_reduce",
        reason: str = "",
        group: str = "",
        kernel: str = "",
    ) -> None:
        """Leave a decision about the place (or places) where ``node`` stands."""
        for place in node.meta.get(WHERE) or self._places.of(node):
            site = Site(fusion, outcome, reason, place, op, group, kernel, self.variant)
            self._decisions.append((node, site))

    def amend(self, node: Node, *, kernel: str) -> None:
        """Add to what was decided about ``node``: it stays an all-reduce, but ``kernel`` runs it."""
        for index, (decided, site) in enumerate(self._decisions):
            if decided is node:
                self._decisions[index] = node, dataclasses.replace(site, kernel=kernel)

    def places(self, node: Node) -> tuple[str, ...]:
        """Every place that a node stands in."""
        return self._places.of(node)

    def note(self, text: str) -> None:
        """Tell something that holds for more than one place."""
        self._recorder.note(text)

    def told(self) -> str:
        """What was decided, in one line."""
        counts = Counter((site.op, site.outcome) for _, site in self._decisions)
        return ", ".join(f"{number} {op} {outcome}" for (op, outcome), number in counts.items()) or "nothing to decide"

    def publish(self) -> None:
        """Hand the decisions to the report, in the order of the graph."""
        for _, site in sorted(self._decisions, key=lambda decision: decision[0].meta[ORDER]):
            self._recorder.site(site)
