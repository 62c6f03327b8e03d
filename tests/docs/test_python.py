"""Every Python block is run, on two CPU ranks. Blocks of one file share their names, in order.

A block that uses ``model``, or ``tpfuse`` or ``torch``, without making it is given a small sharded Llama, or the module.
Graphs are run by an interpreter, not compiled by Inductor, which tests/gloo does. What a report prints is the same.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tests.docs.blocks import FILES, ROOT, Block, blocks
from tpfuse.models.families import build_sharded, family_config
from tpfuse.testing import interpret_graphs, spawn

RANKS = 2
#: File -> reason for not running its Python blocks here. (None so far: what needs a GPU belongs here.)
NOT_RUN: dict[str, str] = {}


def run(block: Block, names: dict) -> str:
    """What it prints. Its lines have their numbers in tracebacks, and in reports."""
    printed = io.StringIO()
    used = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name) and node.id == "model"]
    names |= {"tpfuse": tpfuse, "torch": torch}
    if used and "model" not in names and not any(isinstance(node.ctx, ast.Store) for node in used):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        names["model"] = build_sharded(family_config("llama"), mesh, torch.float32)
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.text, str(block.path), "exec"), names)
    return printed.getvalue()


def _run_all(rank: int) -> dict[str, str]:
    """What each block printed. The first error ends it, on all ranks: tracebacks have the lines of the page."""
    found = {}
    dist.destroy_process_group, destroy = lambda: None, dist.destroy_process_group  # pages end with it; the next goes on
    try:
        with interpret_graphs():
            for path in (path for path in FILES if path.name not in NOT_RUN):
                page = sys.modules[f"page_{path.stem}"] = types.ModuleType(f"page_{path.stem}")  # Dynamo looks it up
                for block in blocks(path, "python"):
                    found[block.where] = run(block, vars(page))
                dist.barrier()
    finally:
        dist.destroy_process_group = destroy
    return found


@pytest.fixture(scope="module")
def ran() -> list[dict[str, str]]:
    """By rank."""
    return spawn(_run_all, RANKS, timeout_s=280)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_blocks(ran, path):
    for block in blocks(path, "python") if path.name not in NOT_RUN else ():
        assert all(block.where in found for found in ran), f"{block.where} was not run"


@pytest.mark.parametrize("name", ["README.md", "docs/first_model.md"])
def test_the_report_is_what_is_printed(ran, name):
    """The text block with a report, line by line; seconds and the list of fusions that are off aside."""
    path = ROOT / name
    (shown,) = (block.text for block in blocks(path, "text") if block.text.startswith("where "))
    program = next(block for block in blocks(path, "python") if "tpfuse.explain" in block.text)
    printed = [line for line in ran[0][program.where].splitlines() if line]
    for line in shown.splitlines():
        assert any(_alike(line, other) for other in printed), f"not printed: {line!r}\n" + "\n".join(printed)
    assert not ran[1][program.where], "rank 1 prints too"


def _alike(shown: str, printed: str) -> bool:
    """Whether they are the same but for seconds; ``...`` stands for what is left out at the end."""
    seconds = re.compile(r"\b[0-9]+\.[0-9]+ s\b")
    shown, printed = (seconds.sub("S s", text) for text in (shown, printed))
    return printed.startswith(shown.removesuffix("...")) if shown.endswith("...") else shown == printed


def test_a_block_that_fails_is_told():
    """With its own line."""
    block = Block(ROOT / "README.md", 7, "python", "x = 1\nraise ValueError(x)\n")
    with pytest.raises(ValueError) as caught:
        run(block, {})
    assert caught.traceback[-1].lineno + 1 == 8
    assert run(Block(ROOT / "README.md", 7, "python", "print(x)\n"), {"x": 3}) == "3\n"
