"""``apply(model, verify=N)``: every Nth call of a compiled graph is compared with the graph as it was, on all ranks."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from tpfuse.comm import agreement, groups
from tpfuse.errors import VerificationError
from tpfuse.graph.nodes import is_node, is_tensor
from tpfuse.graph.provenance import Pair
from tpfuse.graph.shadow import BACKWARD, FORWARD, WHOLE, Comparison, Shadow, halves

_SUBJECT = "a call of a verified graph"


class Verification:
    """What is compared of one graph: of inference, or the joint graph of a training step, whose halves are called apart.

    pair   the graph as it was and as rewritten
    names  process groups of the graph
    every  which calls are compared: the first, and each so many later
    graph  digest of the graph, "" where ranks are known to have different ones: then only their calls are compared
    """

    def __init__(self, pair: Pair, names: Sequence[str], every: int, graph: str) -> None:
        self._names, self._every, self._graph = names, every, graph
        ranks = max(map(groups.size, names), default=1)
        self._shadows = {half: Shadow(pair, ranks, bool(graph), half) for half in halves(pair)}
        self._inputs = [node.name for node in pair.before.graph.find_nodes(op="placeholder")]
        self._calls = 0
        self._kept: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # inputs of the last forward compared; what it gave

    @property
    def compares(self) -> int:
        """Values that one call compares, forward and backward together."""
        return sum(shadow.compares for shadow in self._shadows.values())

    def fits(self, module: GraphModule) -> bool:
        """Whether a compiled graph has all inputs of the graph as it was: not where Inductor has frozen weights."""
        return {*self._inputs} <= {node.name for node in module.graph.find_nodes(op="placeholder")}

    def in_front_of(self, module: GraphModule, half: str = WHOLE) -> Callable[[Callable], Callable]:
        """What makes of a compiled graph, called with a list that it empties, one that is compared when it is called.

        module  what is being compiled, and is changed by that: its inputs and outputs are told apart by their names
        """
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        results = _results(module)
        return functools.partial(self._wrapped, half, names, results)

    def _wrapped(self, half: str, names: list[str], results: dict[str, int], compiled: Callable) -> Callable:
        def verified(inputs: list[Any]) -> Any:
            due = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
            given = dict(zip(names, inputs, strict=True)) if due else {}
            due = due and self._verify(half, given)
            if not due or half != FORWARD:
                given.clear()  # the call may free its inputs as it goes
            outputs = compiled(inputs) if getattr(compiled, "_boxed_call", False) else compiled(*inputs)
            if given:
                self._kept = given, {name: outputs[place] for name, place in results.items()}
            return outputs

        verified._boxed_call = True  # type: ignore[attr-defined]
        return verified

    def _verify(self, half: str, given: dict[str, Any]) -> bool:
        """Compare, if it is this call's turn. Whether it was."""
        if half == BACKWARD:
            number, due = self._calls, self._follows(given)
            given = {**self._kept[0], **given} if due else {}
            self._kept = ({}, {}) if due else self._kept
        else:
            number, self._calls = self._calls, self._calls + 1
            due = number % self._every == 0
        _same(self._names, f"{half} {self._graph}, call {number}, {'compared' if due else 'not compared'}")
        if due:
            found = self._shadows[half].run({name: given[name] for name in self._inputs if name in given})
            judge(self._names, found, alike=bool(self._graph))
        return due

    def _follows(self, given: dict[str, Any]) -> bool:
        """Whether a backward is that of the last forward that was compared: it is given the same tensors."""
        made = self._kept[1]
        shared = [name for name in given if name in made]
        return bool(self._kept[0]) and all(_same_memory(given[name], made[name]) for name in shared)


def _results(module: GraphModule) -> dict[str, int]:
    """Tensors that the graph itself makes and gives out, by name, and where among its outputs."""
    (output,) = module.graph.find_nodes(op="output")
    found = enumerate(output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]])
    return {node.name: place for place, node in found if is_node(node) and node.op == "call_function" and is_tensor(node)}


def _same_memory(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.data_ptr() == b.data_ptr()


def judge(names: Sequence[str], found: Sequence[Comparison], *, alike: bool) -> None:
    """Raise VerificationError on every rank if one of them has found a difference, or they have made others' comparisons.

    names  of the process groups whose ranks make the comparison together
    alike  they have the same graphs, and thus the same sites
    """
    sites = [each.site for each in found] if alike else []
    wrong = next((str(each) for each in found if each.excess > 1), "")
    digest = hashlib.sha256(json.dumps(sites).encode()).hexdigest()
    for name in names:
        everybody = _exchange(name, {"difference": wrong, "sites": digest})
        told = agreement.told(everybody, "difference")
        wrong = told or wrong  # also for the ranks of the next group
        if not told and len({each["sites"] for each in everybody}) > 1:
            lists = [json.loads(each["sites"]) for each in _exchange(name, {"sites": json.dumps(sites)})]
            wrong = _first_difference(lists)
    if wrong:
        raise VerificationError(f"verify: {wrong}")


def _same(names: Sequence[str], call: str) -> None:
    for name in names:
        everybody = _exchange(name, {"call": call})
        if len({each["call"] for each in everybody}) > 1:
            raise VerificationError(
                f"verify: ranks of group {name!r} make different calls: {agreement.told(everybody, 'call')}"
            )


def _exchange(name: str, mine: dict[str, str]) -> list[dict[str, str]]:
    group = groups.resolve(name)
    return agreement.exchange(group, _SUBJECT, mine) if groups.has_peers(group) else [mine]


def _first_difference(lists: list[list[str]]) -> str:
    """The first site at which ranks do not do the same."""
    longest = max(map(len, lists))
    padded = [[*each, *["nothing more"] * (longest - len(each))] for each in lists]
    differing = next(each for each in zip(*padded, strict=True) if len({*each}) > 1)
    return "ranks do not run the same: " + "; ".join(f"rank {rank}: {site}" for rank, site in enumerate(differing))
