"""The house keeps its order: who may import whom, how long a file may be, and what an import may do."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import tpfuse

ROOT = pathlib.Path(tpfuse.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: From the top down. A module may import from its own room and from lower ones.
ROOMS = ("top", "api", "graph", "ops", "kernels", "comm", "leaf")
#: What each room may not even reach although it lies lower: nothing.
LEAVES = {"config", "report", "errors", "tokens", "version", "environment", "tables", "logs", "switch"}
API = {"api", "applied", "compiling", "sharding", "warming"}
#: Commands: above the API, and nobody imports them.
TOP = {"__init__", "__main__", "cli", "demo", "tuner", "testing"}
#: What operations share: no pass makes them.
WITHOUT_A_PASS = {"matmul", "arguments"}
#: models stands beside graph: neither may import the other.
BESIDE = {"models": "graph"}


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """The room of "tpfuse.graph.chain" is "graph"."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else "__init__"
    if first in TOP:
        return "top"
    if first in API:
        return "api"
    if first in LEAVES:
        return "leaf"
    return BESIDE.get(first, first)


def imports_of(path):
    """(module, whether at the top level of the file) of everything of ours that the file imports."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    known = {module_of(p) for p in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "tpfuse":
                yield name, id(node) in top


def test_every_module_has_a_room():
    for path in FILES:
        assert room_of(module_of(path)) in ROOMS, f"{path}: a new room must be put in its place here"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path):
    """api -> {models, graph} -> ops -> kernels -> comm; leaves below all of them. Local imports count too."""
    module = module_of(path)
    mine = room_of(module)
    for imported, _ in imports_of(path):
        other = room_of(imported)
        assert ROOMS.index(other) >= ROOMS.index(mine), f"{module} ({mine}) imports {imported} ({other})"
        first, second = module.split(".")[1:2], imported.split(".")[1:2]
        assert {*first, *second} != {"models", "graph"}, f"{module} imports {imported}: they stand side by side"


def test_leaves():
    """errors imports nothing of ours, config only errors, report only config (and errors)."""
    allowed = {
        "errors": set(),
        "version": set(),
        "tokens": {"errors"},
        "config": {"errors"},
        "report": {"config", "errors", "logs"},
        "logs": set(),
        "switch": set(),
        "environment": {"errors"},
    }
    for path in FILES:
        name = path.stem
        if path.parent == ROOT and name in allowed:
            imported = {module.split(".")[1] for module, _ in imports_of(path)}
            assert imported <= allowed[name], f"{name} imports {imported}"


def test_a_kernel_never_imports_an_operation():
    """Neither now nor by way of something else."""
    graph = {module_of(p): {m for m, _ in imports_of(p)} for p in FILES}
    for start in (m for m in graph if room_of(m) == "kernels"):
        seen, pending = set(), [start]
        while pending:
            for module in graph.get(pending.pop(), ()):
                if module not in seen:
                    seen.add(module)
                    pending.append(module)
        assert not [m for m in seen if room_of(m) in ("ops", "graph", "api")], f"{start} reaches {seen}"


def test_nothing_imports_testing():
    """Only the commands that check their own results may use its tolerances."""
    for path in FILES:
        if "testing" not in path.relative_to(ROOT).parts and room_of(module_of(path)) != "top":
            assert not [m for m, _ in imports_of(path) if m.startswith("tpfuse.testing")], path


def test_no_cycles():
    """Imports at the top of files make no circle, within a room either."""
    graph = {module_of(p): {m for m, top in imports_of(p) if top} for p in FILES if p.name != "__init__.py"}
    done, active = set(), []

    def visit(module):
        assert module not in active, " -> ".join([*active[active.index(module) :], module])
        if module in done or module not in graph:
            return
        active.append(module)
        for imported in sorted(graph[module]):
            visit(imported)
        done.add(active.pop())

    for module in graph:
        visit(module)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_short(path):
    """At most 400 lines a file and 60 a function (its docstring aside), and none is called utils.py."""
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documentation = node.body[0] if ast.get_docstring(node) is not None else None
            lines = node.end_lineno - node.lineno + 1
            lines -= documentation.end_lineno - documentation.lineno + 1 if documentation else 0
            assert lines <= 60, f"{node.name} has {lines} lines"


def test_fusions_have_one_stem():
    """A pass that makes a fused operation has the operation's name, and so has its field's pass."""
    for path in (ROOT / "ops").glob("*.py"):
        if path.stem not in (
            "__init__",
            "library",
            "rms_norm",
            "act_mul",
            "quantize_fp8",
            "quantize_nvfp4",
            *WITHOUT_A_PASS,
        ):
            assert (ROOT / "graph" / path.name).exists(), f"ops/{path.name} has no pass of its name"


_PROBE = """
import json, sys
import torch, torch.distributed as dist, torch.distributed._functional_collectives as funcol
import torch.distributed.tensor, torch._dynamo, torch._inductor.compile_fx as compile_fx
from torch._inductor import config as inductor_config
from torch._functorch import config as functorch_config

def snapshot():
    watched = [torch, torch.nn.Module, torch.nn.functional, dist, dist.distributed_c10d, funcol, torch._dynamo,
               torch._dynamo.backends.registry, compile_fx, torch.Tensor, torch.distributed.tensor.DTensor, torch.ops.aten]
    names = {}
    for owner in watched:
        for name, value in list(vars(owner).items()):
            if callable(value) and not name.startswith("__"):
                names[f"{getattr(owner, '__name__', owner)}.{name}"] = id(value)
    return names

before, configs = snapshot(), (repr(inductor_config.get_config_copy()), repr(functorch_config.get_config_copy()))
modules = set(sys.modules)
import tpfuse
after = snapshot()
print(json.dumps({
    "patched": sorted(name for name, value in before.items() if after.get(name) != value),
    "configs": configs == (repr(inductor_config.get_config_copy()), repr(functorch_config.get_config_copy())),
    "cuda": torch.cuda.is_initialized(),
    "groups": dist.is_initialized(),
    "new": sorted({m.split(".")[0] for m in set(sys.modules) - modules}),
    "testing": any(m.startswith("tpfuse.testing") for m in sys.modules),
    "public": sorted(tpfuse.__all__),
}))
"""


@pytest.fixture(scope="module")
def imported():
    """What ``import tpfuse`` did, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", _PROBE],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_patches_nothing(imported):
    assert imported["patched"] == []
    assert imported["configs"], "a global configuration of torch was changed"


def test_import_starts_nothing(imported):
    assert not imported["cuda"] and not imported["groups"]


def test_import_is_light(imported):
    """Libraries are imported inside the functions that use them."""
    heavy = {"transformers", "flashinfer", "triton", "accelerate", "matplotlib", "pytest", "tqdm", "cuda"}
    assert not heavy & set(imported["new"]), imported["new"]
    assert not imported["testing"]


def test_public_names(imported):
    assert {"apply", "remove", "explain", "FusionConfig", "Report", "Site", "ops"} <= set(imported["public"])
    for name in imported["public"]:
        assert getattr(tpfuse, name, None) is not None
