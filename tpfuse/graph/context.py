"""What the passes over one graph share: the configuration, where nodes stand in the model, and what was decided."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.fx import Graph

from tpfuse.config import Resolved
from tpfuse.graph.nodes import ALL_REDUCE, Node, is_call
from tpfuse.report import Outcome, Recorder, Site

WHERE, ORDER = "tpfuse_where", "tpfuse_order"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
#: Frames that say nothing about the user's model.
_LIBRARY_FRAMES = ("/torch/", "/transformers/distributed/", "/tpfuse/")


class Context:
    """State of one run of the pipeline over one graph."""

    def __init__(self, fusions: Mapping[str, Resolved], recorder: Recorder, variant: str) -> None:
        self.fusions = fusions
        self.variant = variant
        self.rewrites = 0
        self.look_alikes: dict[Node, tuple[str, str]] = {}  # what a look-alike normalises -> (op, reason)
        self._recorder = recorder
        self._decisions: list[tuple[int, Site]] = []

    def locate(self, graph: Graph) -> None:
        """Note where every node stands, in the graph and in the model, before anything moves."""
        seen: dict[str, int] = {}
        for order, node in enumerate(graph.nodes):
            node.meta[ORDER] = order
            if is_call(node, ALL_REDUCE):
                place = where(node)
                seen[place] = seen.get(place, 0) + 1
                node.meta[WHERE] = place if seen[place] == 1 else f"{place}#{seen[place]}"

    def look_alike(self, x: Node, op: str, reason: str, node: Node) -> None:
        """A norm that no fusion understands; remembered for the all-reduces that reach it."""
        self.look_alikes.setdefault(x, (op, reason))
        self.decide("skipped", node, op=op, reason=reason)

    def decide(
        self,
        outcome: Outcome,
        node: Node,
        *,
        op: str = "all_reduce",
        reason: str = "",
        group: str = "",
        kernel: str = "",
        fusion: str = "fuse_allreduce_rms",
    ) -> None:
        """Leave a decision about the place where ``node`` stands."""
        place = node.meta.get(WHERE) or where(node)
        site = Site(fusion, outcome, reason, place, op, group, kernel, self.variant)
        self._decisions.append((node.meta[ORDER], site))

    def publish(self) -> None:
        """Hand the decisions to the report, in the order of the graph."""
        for _, site in sorted(self._decisions, key=lambda decision: decision[0]):
            self._recorder.site(site)


def where(node: Node) -> str:
    """Module path of a node, or file:line of the user's code where there is no module."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = _module_path(stack[-1][0]) if stack else ""
    if path:
        return path
    return _line(node) or (_class_name(stack[-1][1]) if stack else node.name)


def _module_path(source: str) -> str:
    """``model.layers.0.mlp`` from Dynamo's "L['model'].model.layers[0].mlp": the first part is a local variable."""
    tail = re.sub(r"^[A-Za-z_]\w*\[['\"]\w+['\"]\]", "", source)
    tail = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", tail)
    return ".".join(part for part in tail.split(".") if part and part != "_modules")


def _class_name(cls: object) -> str:
    return cls.rpartition(".")[2] if isinstance(cls, str) else getattr(cls, "__name__", str(cls))


def _line(node: Node) -> str:
    """file:line of the innermost frame that belongs to the user."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(frames):
        if not any(part in frame["file"].replace("\\", "/") for part in _LIBRARY_FRAMES):
            return f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
    return ""
