"""Which node of a rewritten graph stands for which node of the graph before, for ``verify`` to compare their values.

No pass is asked: whatever takes the place of a node in the arguments of others says so by that, and is heard here. Only
``enable_sp`` tells itself which values are a rank's rows of which (``ROWS_OF``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from tpfuse.graph.nodes import ALL_REDUCE, ROWS_OF, WAIT, WHERE, Node, is_call, sole_user
from tpfuse.graph.places import Places


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a value is compared with.

    node   of the graph as it was
    group  name of the process group over whose ranks the value's rows are sharded; "": it is whole
    """

    node: Node
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A graph before and after the passes, as copies that nothing else changes.

    same      node after -> the same node before, of those that stayed
    expected  node after -> what it stands for, itself included
    places    node after -> where it stands in the model
    """

    before: GraphModule
    after: GraphModule
    same: dict[Node, Node]
    expected: dict[Node, tuple[Expected, ...]]
    places: dict[Node, str]


class Provenance:
    """Follows what becomes of the nodes of one graph while it is rewritten."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._before, self._copies = _copied(module)  # original node -> its copy
        self._taken: dict[str, dict[Expected, None]] = {}  # name of a node -> originals whose place it took

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Listen, in this block, to what replaces what."""
        with self._module._set_replace_hook(self._replaced):
            yield

    def pair(self, places: Places) -> Pair:
        """Both graphs; to be called when the passes are done."""
        after, copies = _copied(self._module)
        expected = {
            copy: tuple(Expected(_awaited(self._copies[each.node]), each.group) for each in self._of(node))
            for node, copy in copies.items()
        }
        where = {copy: ", ".join(node.meta.get(WHERE) or places.of(node)) for node, copy in copies.items()}
        same = {copies[node]: self._copies[node] for node in copies if node in self._copies}
        return Pair(self._before, after, same, expected, where)

    def _replaced(self, old: Node, new: str, user: Node) -> None:
        self._taken.setdefault(new, {}).update(dict.fromkeys(self._of(old)))

    def _of(self, node: Node) -> tuple[Expected, ...]:
        """What a node stands for: itself, what it has replaced, what it has the rows of."""
        found = dict.fromkeys([Expected(node)] if node in self._copies else [])
        found.update(self._taken.get(node.name, {}))
        if ROWS_OF in node.meta:
            whole, group = node.meta[ROWS_OF]
            found.update({dataclasses.replace(each, group=group): None for each in self._of(whole) if not each.group})
        return tuple(found)


def _awaited(node: Node) -> Node:
    """The wait for an all-reduce, before which its value may not be read: in the graph before, which still has both."""
    wait: Node = sole_user(node) if is_call(node, ALL_REDUCE) else None
    return wait if is_call(wait, WAIT) else node


def _copied(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy of a graph that holds no fake values: they would keep the compiler's state alive."""
    graph, copies = Graph(), dict[Node, Node]()
    result = graph.graph_copy(module.graph, copies)
    output = graph.output(result)
    for original in module.graph.find_nodes(op="output"):
        copies[original] = output
    for copy in copies.values():
        copy.meta = {}
    attributes: dict[str, Any] = {
        str(node.target): _attribute(module, str(node.target)) for node in graph.find_nodes(op="get_attr")
    }
    return GraphModule(attributes or torch.nn.Module(), graph), copies


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
