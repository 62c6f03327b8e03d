"""NAME: where each of our operations stands in the model becomes an argument of its calls, for profiles (TPFUSE_NVTX).

So the name is part of the graph, of what Inductor compiles, and of its cache's key. Ranks may differ in it: it changes
nothing that is computed.
"""

from __future__ import annotations

from torch.fx import Graph

from tpfuse.config import is_annotating
from tpfuse.graph.context import Context
from tpfuse.graph.nodes import WHERE
from tpfuse.ops.library import SITE, has_site
from tpfuse.report import any_layer


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if is_annotating() else ():
        if node.op == "call_function" and has_site(node.target):
            node.update_kwarg(SITE, _one(node.meta.get(WHERE) or context.places(node)))


def _one(places: tuple[str, ...]) -> str:
    """One name for all places that the same code serves."""
    if len(places) == 1:
        return places[0]
    return ", ".join(dict.fromkeys(map(any_layer, places)))
