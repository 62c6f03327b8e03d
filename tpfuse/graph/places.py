"""Where a node stands in the model: module paths, or file:line where there is no module.

A graph that Dynamo compiled for the whole model has whole paths. One that it compiled for an inner call (behind a graph
break) has paths from that call on, and the same code then serves every module of the kind: such a node stands in each of
them.
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref

import torch

from tpfuse.graph.nodes import Node, is_backward

#: Name under which the applied model is known to its own compiled entry (tpfuse/applied.py).
ENTRY_VARIABLE = "model"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_VARIABLE = re.compile(r"^\w+\[['\"](?P<name>\w+)['\"]\]")
#: Folders whose frames say nothing about the user's model.
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
_SHARDING = os.path.join("transformers", "distributed") + os.sep


class Places:
    """Finds places in one model; without a model, paths stay as the graph has them. Does not keep the model alive.

    fingerprint  of the model's modules: the same on ranks that have the same
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._classes: dict[str, str] = {}  # path -> class of the module there
        self._names: dict[str, list[str]] = {}  # class name -> paths of its instances
        self.fingerprint = ""
        self.refresh()

    def refresh(self) -> set[str]:
        """Look at the model again. Returns paths where the module has gone, or is of another class, since the last look."""
        model = self._model() if self._model is not None else None
        if model is None:
            return set()
        before, self._classes = self._classes, {name: type(m).__qualname__ for name, m in model.named_modules()}
        if before == self._classes:
            return set()
        self._names = {}
        for name, module in model.named_modules():
            self._names.setdefault(type(module).__name__, []).append(name)
        self.fingerprint = fingerprint(model)
        return {name for name, kind in before.items() if self._classes.get(name) != kind}

    def of(self, node: Node) -> tuple[str, ...]:
        """Every place that the node stands in, at least one."""
        places = self._of(node)
        return tuple(f"{place} (backward)" for place in places) if is_backward(node) else places

    def _of(self, node: Node) -> tuple[str, ...]:
        stack = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
        if not stack:
            return (_line(node) or node.name,)
        source, cls = stack[-1]
        path, kind = _module_path(source), _class_name(cls)
        variable = _VARIABLE.match(source)
        known = self._names.get(kind, [])
        if path and (not known or (variable and variable["name"] == ENTRY_VARIABLE and path in known)):
            return (path,)
        inner = not (variable and variable["name"] == ENTRY_VARIABLE)  # of the model itself, a line says more than ""
        ends = [
            name for name in known if name and (name == path or (inner and f".{name}".endswith(f".{path}" if path else "")))
        ]
        return tuple(ends) or (path or _line(node) or kind,)


def fingerprint(model: torch.nn.Module) -> str:
    """Equal for models that have modules of the same classes under the same names."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    return hashlib.sha256(repr(modules).encode()).hexdigest()[:12]


def _module_path(source: str) -> str:
    """``model.layers.0.mlp`` from Dynamo's "L['model'].model.layers[0].mlp": the first part is a local variable."""
    tail = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", _VARIABLE.sub("", source))
    return ".".join(part for part in tail.split(".") if part and part != "_modules")


def _class_name(cls: object) -> str:
    return cls.rpartition(".")[2] if isinstance(cls, str) else getattr(cls, "__name__", str(cls))


def _line(node: Node) -> str:
    """file:line of the innermost frame that belongs to the user."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(frames):
        if not frame["file"].startswith(_LIBRARIES) and _SHARDING not in frame["file"]:
            return f"{os.path.basename(frame['file'])}:{frame['line']}"
    return ""
