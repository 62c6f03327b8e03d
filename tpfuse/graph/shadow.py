"""The graph as it was and the graph as rewritten, side by side: what each operation of ours gives, on the values that it
would have had without us.

Values are computed by the graph as it was. Of the rewritten one only what the passes put in is computed, on those values;
wherever it stands for a value of the other, it is compared with it and then replaced by it. So errors do not add up, and
what differs is the fault of the operations since the last comparison: of a kernel, or of the pass that put them there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpfuse.comm import groups
from tpfuse.errors import TpfuseError, first_line
from tpfuse.graph import joint
from tpfuse.graph.nodes import Node, aten, is_call, is_collective, is_node
from tpfuse.graph.provenance import Expected, Pair
from tpfuse.graph.rounding import eps, excess
from tpfuse.kernels import REFERENCE, dispatch

#: What of a graph is compared: all of it, or what of a joint graph does not depend on gradients, and what does.
WHOLE, FORWARD, BACKWARD = "graph", "forward", "backward"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One value of the rewritten graph beside what it stands for.

    site        place in the model, operation and kernel, and the rows of what it gives
    excess      difference as a multiple of what is allowed: more than one is too much
    difference  the largest of an element
    """

    site: str
    excess: float
    difference: float
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.site}: {self.error}"
        return f"{self.site}: differs by {self.difference:.3g}, {self.excess:.3g} times as much as rounding may"


@dataclasses.dataclass
class _Step:
    """One node to compute, of the graph as it was or of the rewritten one, and what nothing reads after it."""

    node: Node
    rewritten: bool = False
    done_with: list[Node] = dataclasses.field(default_factory=list)


class Shadow:
    """A comparison of two graphs that can be made again and again.

    ranks  of the largest group of the graphs
    alike  they are known to have the same graphs: then the two may take turns, which needs less memory
    half   which part of the graphs
    """

    def __init__(self, pair: Pair, ranks: int, alike: bool, half: str = WHOLE) -> None:
        self._pair, self._ranks, self._half = pair, ranks, half
        self._of_gradients = _of_gradients(pair.before.graph) | _of_gradients(pair.after.graph)
        self._inputs: list[Node] = list(pair.before.graph.find_nodes(op="placeholder"))
        self._stays = self._unchanged()  # nodes after whose value is that of a node before
        self._expected = self._claims()
        self._written = _written_inputs(pair.before.graph)
        self._random = any(torch.Tag.nondeterministic_seeded in _tags(node) for node in pair.before.graph.nodes)
        self._steps = self._schedule(in_order=not alike or bool(self._written))
        self.compares = sum(len(self._expected.get(step.node, ())) for step in self._steps if step.rewritten)

    def run(self, inputs: Mapping[str, Any]) -> list[Comparison]:
        """Compute and compare. Collective, and without effects on the inputs or on random numbers.

        inputs  of the graph as it was, by name; the gradients are not needed for the forward
        """
        devices = [t.device.index for t in inputs.values() if isinstance(t, torch.Tensor) and t.is_cuda][:1]
        fork = torch.random.fork_rng(devices) if self._random else contextlib.nullcontext()
        with torch.no_grad(), fork:
            return _Run(self._pair, self._stays, self._expected, self._ranks).steps(self._steps, self._loaded(inputs))

    def _loaded(self, inputs: Mapping[str, Any]) -> dict[Node, Any]:
        given = {node: inputs[node.name] for node in self._inputs if node.name in inputs}
        return {node: each.clone() if node in self._written else each for node, each in given.items()}

    # -- what has to be computed, and when ------------------------------------------------------------------------------

    def _unchanged(self) -> dict[Node, Node]:
        """Nodes that both graphs have, and that read the same in both, as far as what they read is compared."""
        found: dict[Node, Node] = {}
        for node in self._pair.after.graph.nodes:
            before = self._pair.same.get(node)
            if before is not None and node.op != "output" and not self._differing(node, before, found):
                found[node] = before
        return found

    def _differing(self, node: Node, before: Node, stays: dict[Node, Node]) -> list[tuple[Any, Any]]:
        """Arguments of a node, now and before, that are not known to be the same."""
        now, then = (tree_leaves((n.args, n.kwargs)) for n in (node, before))
        if len(now) != len(then):
            return [(node, before)]
        return [(a, b) for a, b in zip(now, then, strict=True) if not self._is_same(a, b, stays)]

    def _is_same(self, now: Any, then: Any, stays: dict[Node, Node]) -> bool:
        if not is_node(now) or not is_node(then):
            return bool(now is then or (type(now) is type(then) and now == then))
        if now in stays:
            return stays[now] is then
        return not is_collective(now) and Expected(then) in self._pair.expected[now]

    def _claims(self) -> dict[Node, list[Expected]]:
        """What the nodes that are computed again are compared with. Not a collective: its value is there after the wait."""
        found = {
            node: [*self._pair.expected[node]]
            for node in self._pair.after.graph.nodes
            if node.op == "call_function" and node not in self._stays and not is_collective(node)
        }
        for node in self._pair.after.graph.find_nodes(op="output"):
            for now, then in self._differing(node, self._pair.same[node], self._stays):
                assert is_node(now) and is_node(then), "a pass has changed the kind of an output"
                found.setdefault(now, []).append(Expected(then))
        return found

    def _schedule(self, in_order: bool) -> list[_Step]:
        """Nodes after in their order, each with what it needs of the graph before in front of it.

        in_order  all of that graph first, as it is
        """
        steps: list[_Step] = []
        order = {node: place for place, node in enumerate(self._pair.before.graph.nodes)}
        computed = {*self._inputs}

        def demand(nodes: Iterable[Node]) -> None:
            missing, pending = set(), [*nodes]
            while pending:
                node = pending.pop()
                if node not in computed and node not in missing:
                    missing.add(node)
                    pending += node.all_input_nodes
            steps.extend(_Step(node) for node in sorted(missing, key=order.__getitem__))
            computed.update(missing)

        if in_order:
            demand(node for node in order if self._is_in_half(node) and not _is_final_write(node))
        wanted = self._wanted()
        for node in self._pair.after.graph.nodes:
            if node in wanted:
                demand(self._reads(node))
                steps.append(_Step(node, rewritten=True))
        self._forget(steps)
        return steps

    def _wanted(self) -> set[Node]:
        """Nodes after that are computed: compared in this half, or read there and not a whole value of the other graph."""
        wanted: set[Node] = set()
        for node in reversed(self._pair.after.graph.nodes):
            if self._is_in_half(node) and (node not in self._stays or node in self._expected):
                wanted.add(node)
            if node in wanted and node not in self._stays:
                wanted |= {s for s in node.all_input_nodes if _stands_for(self._stays, self._expected, s) is None}
        return wanted

    def _is_in_half(self, node: Node) -> bool:
        of_gradients = node in self._of_gradients
        return node.op != "output" and (self._half == WHOLE or of_gradients == (self._half == BACKWARD))

    def _reads(self, node: Node) -> list[Node]:
        """Nodes before that a step of the rewritten graph reads."""
        sources = [node] if node in self._stays else node.all_input_nodes
        whole = [stands for source in sources if (stands := _stands_for(self._stays, self._expected, source))]
        return [*whole, *(each.node for each in self._expected.get(node, ()))]

    def _forget(self, steps: list[_Step]) -> None:
        """Note with each step what is read by no later one. A collective reads its input until it is waited for."""
        seen = {*self._inputs}
        for step in reversed(steps):
            started = [source for source in step.node.all_input_nodes if is_collective(source)]
            read = [node for reader in (step.node, *started) for node in reader.all_input_nodes]
            if step.rewritten:
                read += [node for reader in (step.node, *started) for node in self._reads(reader)]
            for node in (step.node, *read):
                if node not in seen:
                    seen.add(node)
                    step.done_with.append(node)


def _stands_for(stays: dict[Node, Node], expected: dict[Node, list[Expected]], node: Node) -> Node | None:
    """The node before whose value is taken wherever this one is read; None: what was computed for it is taken."""
    if node in stays:
        return stays[node]
    return next((each.node for each in expected.get(node, ()) if not each.group), None)


class _Run:
    """One comparison: the values that there are, and what was found."""

    def __init__(self, pair: Pair, stays: dict[Node, Node], expected: dict[Node, list[Expected]], ranks: int) -> None:
        self._pair, self._stays, self._expected, self._ranks = pair, stays, expected, ranks
        self._before, self._after = (torch.fx.Interpreter(module) for module in (pair.before, pair.after))
        self._coarsest: dict[Node, float] = {}  # eps of what went into a value since the last comparison
        self._origin: dict[
            Node, tuple[str, str, bool]
        ] = {}  # what made it, where that stands, whether ranks share its rows
        self._found: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def steps(self, steps: Sequence[_Step], inputs: dict[Node, Any]) -> list[Comparison]:
        self._before.env = dict(inputs)
        failed: list[Comparison] = []
        for step in steps:
            if step.rewritten:
                try:
                    self._compute(step.node)
                except TpfuseError:
                    raise
                except Exception as error:  # of whatever kind: a pass may have put anything there
                    name = getattr(step.node.target, "__name__", str(step.node.target))
                    told = f"{type(error).__name__}: {first_line(error)}"
                    failed.append(Comparison(f"{self._pair.places[step.node]}: {name}", float("inf"), 0.0, told))
                    break
            else:
                self._before.env[step.node] = self._before.run_node(step.node)
            for node in step.done_with:
                self._before.env.pop(node, None)
                self._after.env.pop(node, None)
        numbers = torch.stack([n.cpu() for _, *pair in self._found for n in pair]).tolist() if self._found else []
        sites = [site for site, *_ in self._found]
        return [*map(Comparison, sites, numbers[::2], numbers[1::2]), *failed]

    def _compute(self, node: Node) -> None:
        kernels: list[str] = []
        if node in self._stays:  # read by nobody, but given out in another's place
            result = self._before.env[self._stays[node]]
        else:
            for source in node.all_input_nodes:
                stands = _stands_for(self._stays, self._expected, source)
                if stands is not None:
                    self._after.env[source] = self._before.env[stands]
            with dispatch.watched() if _is_ours(node) else contextlib.nullcontext(kernels) as kernels:
                result = self._after.run_node(node)
        self._trace(node, result, kernels)
        for expected in self._expected.get(node, ()):
            result = self._compare(node, result, expected)
        self._after.env[node] = result

    def _trace(self, node: Node, result: Any, kernels: list[str]) -> None:
        """Remember what the value was made by, and how coarsely."""
        sources = [s for s in node.all_input_nodes if s not in self._stays and not self._expected.get(s)]
        tensors = [t for t in tree_leaves((result, [self._after.env.get(s) for s in node.all_input_nodes])) if _is_float(t)]
        self._coarsest[node] = max(
            [eps(t.dtype) for t in tensors if t.dtype.itemsize > 1] + [self._coarsest.get(s, 0.0) for s in sources],
            default=0.0,
        )
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if _is_ours(node):
            name = f"{name} by {'/'.join(kernels) or REFERENCE}"
        shared = _is_ours(node) or is_collective(node)
        inner = None if shared else next(filter(None, map(self._origin.get, sources)), None)
        self._origin[node] = inner or (name, self._pair.places[node], shared)

    def _compare(self, node: Node, result: Any, expected: Expected) -> Any:
        """Compare with one value that the node stands for, and return that; with rows of a rank, what is not there kept."""
        wanted = self._before.env[expected.node]
        if not isinstance(wanted, torch.Tensor) or not isinstance(result, torch.Tensor):
            return result if expected.group else wanted
        found = result
        if expected.group:
            share, rank = result.shape[0], groups.resolve(expected.group).rank()
            wanted = wanted.reshape(-1, *result.shape[1:])[rank * share : (rank + 1) * share]
            found = result[: wanted.shape[0]]
        name, place, shared = self._origin[node]
        site = f"{place}: {name}{f' {list(result.shape[:-1])}' if shared else ''}"
        self._found.append((site, *excess(found, wanted, max(self._coarsest[node], eps(wanted.dtype)), self._ranks)))
        return torch.cat((wanted, result[wanted.shape[0] :])) if expected.group else wanted


def halves(pair: Pair) -> tuple[str, ...]:
    """The parts in which a graph is compared."""
    return (FORWARD, BACKWARD) if joint.is_joint(pair.before.graph) else (WHOLE,)


def _of_gradients(graph: torch.fx.Graph) -> set[Node]:
    """What depends on the gradients that a joint graph is given."""
    found: set[Node] = set()
    for node in graph.nodes:
        if joint.is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_ours(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "tpfuse"


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _tags(node: Node) -> Sequence[Any]:
    return getattr(node.target, "tags", ()) if node.op == "call_function" else ()


def _is_final_write(node: Node) -> bool:
    """Whether the graph hands a new value to one of its inputs by it, and nothing reads that: AOTAutograd's last step."""
    return is_call(node, aten.copy_.default) and not node.users and node.args[0].op == "placeholder"


def _written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Inputs that the graph changes as it goes, which a comparison must not: it gets copies of them."""
    found: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable or _is_final_write(node):
            continue
        pending, seen = [*node.all_input_nodes], set()
        while pending:  # to whatever it may be a view of
            source = pending.pop()
            if source not in seen:
                seen.add(source)
                found |= {source} if source.op == "placeholder" else set()
                pending += source.all_input_nodes if source.op == "call_function" and _is_view(source) else []
    return found


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(each.alias_info is not None for each in schema.returns)
