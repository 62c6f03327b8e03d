"""Row counts that vary, as arguments of new nodes: found at the top of the graph, or computed there.

Symbols cannot be arguments of nodes, only nodes that compute them can. No condition on a symbol is ever asked for.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph

from tpfuse.graph.nodes import Node, aten, value


class Sizes:
    """Sizes of one graph: a number stands for itself, a symbolic one for the node that computes it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._last: Node | None = None  # after which the next one goes
        self._computed: dict[Any, Node] = {}  # expression -> node
        self._found: dict[Any, tuple[Node, int]] = {}  # symbol -> (input, dimension) of that size
        for node in graph.nodes:
            if node.op != "placeholder" and not isinstance(value(node), torch.SymInt):
                break  # what was computed before stands at the top
            self._last = node
            if isinstance(value(node), torch.SymInt):
                self._computed.setdefault(value(node).node.expr, node)
            elif isinstance(value(node), torch.Tensor):
                for dim, size in enumerate(value(node).shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._found.setdefault(size.node.expr, (node, dim))

    def known(self, size: Any) -> bool:
        """Whether ``of`` can answer: sums and products of sizes of the graph's inputs."""
        return isinstance(size, int) or (isinstance(size, torch.SymInt) and self._known(size.node.expr))

    def of(self, size: Any) -> Any:
        """The number, or the node that computes it."""
        return size if isinstance(size, int) else self._of(size.node.expr)

    def add(self, a: Any, b: Any) -> Any:
        return self._binary(operator.add, a, b)

    def subtract(self, a: Any, b: Any) -> Any:
        return self._binary(operator.sub, a, b)

    def multiply(self, a: Any, b: Any) -> Any:
        return self._binary(operator.mul, a, b)

    def divide(self, a: Any, b: int) -> Any:
        """Whole quotient, rounded down."""
        return self._binary(operator.floordiv, a, b)

    def _known(self, expression: Any) -> bool:
        if expression in self._computed or expression in self._found or expression.is_Integer:
            return True
        return isinstance(expression, (sympy.Add, sympy.Mul)) and all(self._known(part) for part in expression.args)

    def _of(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self._computed:
            return self._computed[expression]
        if expression in self._found:
            return self._call(aten.sym_size.int, *self._found[expression])
        assert isinstance(expression, (sympy.Add, sympy.Mul)), f"{expression} was not known"
        return functools.reduce(
            self.add if isinstance(expression, sympy.Add) else self.multiply, map(self._of, expression.args)
        )

    def _binary(self, target: Any, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return target(a, b)
        return self._call(target, a, b)

    def _call(self, target: Any, *args: Any) -> Any:
        values = [value(a) if isinstance(a, torch.fx.Node) else a for a in args]
        result = target(*values)
        if isinstance(result, int):
            return result
        expression = result.node.expr
        if expression not in self._computed:
            with self._graph.inserting_after(self._last):
                node: Node = self._graph.call_function(target, args)
            self._last = node
            node.meta["val"] = result
            self._computed[expression] = node
        return self._computed[expression]


def number_or_value(size: Any) -> Any:
    """The number, or the symbolic number that the node computes."""
    return value(size) if isinstance(size, torch.fx.Node) else size
