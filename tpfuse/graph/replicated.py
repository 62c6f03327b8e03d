"""What every rank of a group has alike, and what it has not: a graph alone does not tell.

A DTensor says what it is. In a model that shards by DTensors over the group, a plain parameter is replicated by convention
(Hugging Face's router, DeepSeek's attention); whether it is, the ranks' bits show. In a model without DTensors nothing is
known: equal bits may be shards that were made from one seed, and get other values later.

A graph of the same operations may have another constant on each rank (where its part of a vocabulary starts, which
expert is its own). What is made of those differs, whatever else it is made of.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import Graph
from torch.utils.weak import WeakIdKeyDictionary

from tpfuse.comm import agreement, groups
from tpfuse.graph.nodes import Node

_NO_WEIGHTS = (torch.int64, torch.bool)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights(graph: Graph, inputs: Sequence[Any], group_name: str) -> set[Node]:
    """Inputs of the graph that are replicated weights, or no matrices of weights.

    Collective where some were not compared yet.

    inputs  the tensors that the graph is compiled for, by the number that torch gives its inputs
    """
    if not any(isinstance(each, DTensor) and _sharded(each, group_name) for each in inputs):
        return set()
    found, asked = set(), {}
    group = groups.resolve(group_name)
    known = _same.setdefault(group, WeakIdKeyDictionary())
    for node in graph.nodes:
        given = _given(node, inputs)
        if isinstance(given, DTensor):
            if _over(given, group_name) and not _sharded(given, group_name):
                found.add(node)
        elif type(given) is torch.nn.Parameter and given.dim() > 1 and given.is_floating_point():
            asked[node] = given
        elif isinstance(given, torch.Tensor) and (given.dim() < 2 or given.dtype in _NO_WEIGHTS):
            found.add(node)  # tokens, masks, frequencies, vectors
    new = [given for given in asked.values() if given not in known]
    if new:
        everybody = agreement.exchange(group, "comparing weights", {str(n): _bits(each) for n, each in enumerate(new)})
        for number, each in enumerate(new):
            bits = {one.get(str(number)) for one in everybody}
            known[each] = len(bits) == 1 and "" not in bits
    return found | {node for node, given in asked.items() if known[given]}


def unlike(graph: Graph, inputs: Sequence[Any], group_name: str, digest: str) -> set[Node]:
    """Nodes whose constants, and inputs of whole numbers whose bits, differ between the group's ranks.

    Collective where the group sees a graph of this digest for the first time: a rank that compiles it again, for itself,
    does not wait for the others.
    """
    group, nodes = groups.resolve(group_name), list(graph.nodes)
    known = _unlike.setdefault(group, {})
    if digest not in known and groups.has_peers(group):
        mine = {str(number): _constants(node, inputs) for number, node in enumerate(nodes)}
        everybody = agreement.exchange(group, "comparing constants", {name: told for name, told in mine.items() if told})
        known[digest] = {int(name) for name in mine if len({each.get(name) for each in everybody}) > 1}
    return {nodes[number] for number in known.get(digest, ())}


def _constants(node: Node, inputs: Sequence[Any]) -> str:
    """All that a node's value depends on besides other nodes; "" if that is nothing, or nothing that is compared."""
    if node.op == "get_attr":
        found = getattr(node.graph.owning_module, node.target, None)
        return _digest(found) if isinstance(found, torch.Tensor) else ""
    if node.op == "placeholder":
        given = _given(node, inputs)
        whole = type(given) in (torch.Tensor, torch.nn.Buffer) and not given.is_floating_point() and not given.is_complex()
        return _digest(given) if whole else ""
    if node.op != "call_function":
        return ""
    constants: list[Any] = []
    flat = torch.utils._pytree.tree_leaves((node.args, sorted(node.kwargs.items())))
    for each in flat:
        constants.append(each.type if isinstance(each, torch.device) else "" if isinstance(each, torch.fx.Node) else each)
    return repr(constants) if any(isinstance(each, (int, float)) for each in constants) else ""


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


#: By group, then by parameter: whether all ranks have the same.
_same: weakref.WeakKeyDictionary[Any, WeakIdKeyDictionary] = weakref.WeakKeyDictionary()
_unlike: weakref.WeakKeyDictionary[Any, dict[str, set[int]]] = weakref.WeakKeyDictionary()  # by group, then by digest


def _given(node: Node, inputs: Sequence[Any]) -> Any:
    """The tensor that an input of the graph is, or is the local part of."""
    found: Any = node.meta.get("desc") if node.op == "placeholder" else None
    while hasattr(found, "base"):
        found = found.base
    number = getattr(found, "idx", None)
    return inputs[number] if isinstance(number, int) and number < len(inputs) else None


def _over(tensor: DTensor, group_name: str) -> list[Any]:
    """Its placements over the group."""
    mesh = tensor.device_mesh
    pairs = ((mesh.get_group(dim), placement) for dim, placement in enumerate(tensor.placements))
    return [
        placement for group, placement in pairs if isinstance(group, dist.ProcessGroup) and group.group_name == group_name
    ]


def _sharded(tensor: DTensor, group_name: str) -> bool:
    return any(not placement.is_replicate() for placement in _over(tensor, group_name))


def _bits(tensor: torch.Tensor) -> str:
    """Sums over rows and over columns, weighted by where they stand: alike for the same bits, hardly for others.

    "" if all are the same number, as shards are that nobody has filled yet.
    """
    numbers = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten(0, -2)
    if not numbers.numel() or bool((numbers == numbers[0, 0]).all()):
        return ""
    sums = []
    for dim in (0, 1):
        total = numbers.sum(dim, dtype=torch.int64)
        sums.append((total * torch.arange(1, total.numel() + 1, device=total.device)).sum())
    return f"{tensor.dtype} {list(tensor.shape)} {torch.stack(sums).tolist()}"
