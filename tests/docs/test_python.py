"""Every Python block is run, on two CPU ranks as torchrun would start them. Blocks of one file share their names, in order.

A block that uses ``model``, or ``tpfuse`` or ``torch``, without making it is given a small sharded Llama, or the module.
Graphs are run by an interpreter, not compiled by Inductor, which tests/gloo does. What a report prints is the same.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import traceback

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
        mesh = init_device_mesh("cpu", (dist.get_world_size() if dist.is_initialized() else RANKS,), mesh_dim_names=("tp",))
        names["model"] = build_sharded(family_config("llama"), mesh, torch.float32)
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.text, str(block.path), "exec"), names)
    return printed.getvalue()


def _run_all(rank: int, port: int) -> dict[str, tuple[str, str]]:
    """Of each block (what it printed, the error that it ended in). A file ends at its first error."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    found: dict[str, tuple[str, str]] = {}
    for number, path in enumerate(FILES):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # no keys of the file before are met in the store
        names: dict = {"__name__": "__main__"}
        with interpret_graphs():
            for block in blocks(path, "python") if path.name not in NOT_RUN else ():
                try:
                    found[block.where] = run(block, names), ""
                except BaseException:
                    found[block.where] = "", traceback.format_exc()
                    break
        names.clear()
        torch._dynamo.reset()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ran() -> list[dict[str, tuple[str, str]]]:
    """By rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return spawn(_run_all, RANKS, store.port, backend="", timeout_s=280)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_blocks(ran, path):
    for block in blocks(path, "python") if path.name not in NOT_RUN else ():
        for rank, found in enumerate(ran):
            assert block.where in found, f"{block.where}: not reached"
            assert not found[block.where][1], f"{block.where}, rank {rank}: {found[block.where][1]}"


@pytest.mark.parametrize("name", ["README.md", "docs/first_model.md"])
def test_the_report_is_what_is_printed(ran, name):
    """The text block with a report, line by line; seconds and the list of fusions that are off aside."""
    path = ROOT / name
    (shown,) = (block.text for block in blocks(path, "text") if block.text.startswith("where "))
    program = next(block for block in blocks(path, "python") if "tpfuse.explain" in block.text)
    printed = [line for line in ran[0][program.where][0].splitlines() if line]
    for line in shown.splitlines():
        assert any(_alike(line, other) for other in printed), f"not printed: {line!r}\n" + "\n".join(printed)
    assert not ran[1][program.where][0], "rank 1 prints too"


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
