"""Our GEMM kernels on a single GPU, each with itself as its only peer, beside cuBLAS's GEMM alone.

    python benchmarks/gemm_loopback.py                                  # five models' shapes at two ranks, bf16
    python benchmarks/gemm_loopback.py --fp8 --rows 2048 8192
    python benchmarks/gemm_loopback.py --rows 64 128 256 512 --split   # also with and without K of a tile split
    torchrun --nproc-per-node 2 benchmarks/gemm_loopback.py             # the same on two GPUs at once, and the real thing

A kernel pushes to its own memory what it would push to a peer, waits for that and adds it: everything is as on two GPUs but
the wire and the other rank. What it takes beyond the GEMM alone is what the kernel itself costs; what the real one takes
beyond that, on two GPUs, is what the wire and the other rank cost. Tilings go by the rule that holds without a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pathlib
import socket
import statistics
import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from gemm_overlap import GATHER, GRAPH_FLOP, MODELS, MOST_CALLS, OPS, SCATTER, Operands, bodies, layers
from timing import RESULTS, Ranks, capture, commit, launch, replayed_us, write_rows

from tpfuse.comm import arena, workspace
from tpfuse.comm.workspace import DATA_OFFSET
from tpfuse.kernels.cuda import all_gather_matmul, build, matmul_reduce_scatter

WORLD, BYTES, REST_S, DEADLINE_NS = 2, 512 << 20, 0.06, int(2e9)
FIELDS = ("op", "m", "n", "k", "dtype", "gpu", "torch", "idle", "candidate", "us", "commit")


class Loopback:
    """What ``comm.workspace.Workspace`` and its arena give kernels."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros((DATA_OFFSET + BYTES) // 4, dtype=torch.int32, device=device)
        self.record = torch.zeros(4, dtype=torch.int32).pin_memory()
        self._control = torch.tensor([0, DEADLINE_NS, self.record.data_ptr()], dtype=torch.int64, device=device)
        self.bytes, self.profile, self.base = BYTES, None, self._memory.data_ptr()
        self.peers = [self.base]
        self.arena = types.SimpleNamespace(
            rank=0,
            world=WORLD,
            device=device,
            control=self._control.data_ptr(),
            multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
            enter=lambda: torch.cuda.current_stream().cuda_stream,
        )


def kernel_of(space: Loopback, files: tuple[str, ...], macros: tuple[tuple[str, int], ...], shared_bytes: int) -> int:
    """As ``gemm.kernel_of``, without other ranks to agree with."""
    return build.kernel(files, macros, shared_bytes, space.arena.device.index)


def body(
    space: Any, op: str, m: int, operands: Operands, fp8: bool, split: bool | None = None
) -> Callable[[int], torch.Tensor]:
    """The kernel on one workspace. split: whether two multiprocessors compute a tile, None: by rule."""
    own = all_gather_matmul if op == GATHER else matmul_reduce_scatter

    def run(turn: int) -> torch.Tensor:
        if split is None:
            return by_rule(turn)
        with unittest.mock.patch.object(own, "pays_to_split", lambda *_: split):
            return by_rule(turn)

    def by_rule(turn: int) -> torch.Tensor:
        weight, dtype = operands.weight(turn), torch.bfloat16
        if op == GATHER:
            own = operands.shard_options
            scales = (own["input_scale"], own["weight_scales"], dtype) if fp8 else ()
            return all_gather_matmul.all_gather_matmul(space, operands.shard, [weight], m, [], False, *scales)[0]
        own = operands.whole_options
        scales = ((own["input_scale"], own["weight_scale"]), dtype) if fp8 else ()
        arguments = (space, operands.whole, weight, None, m // WORLD, *scales)
        return matmul_reduce_scatter.matmul_reduce_scatter(*arguments, all_rows=op not in (GATHER, SCATTER))

    return run


def wrong(op: str, whole: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error: of a sum with the rows that a peer would have sent, or of the rows that one would have sent."""
    mine, others = whole.float().chunk(WORLD)
    expected = mine if op == GATHER else mine + others.bfloat16().float()
    if op != SCATTER:
        expected = torch.cat([expected] * WORLD)
    return ((got.float() - expected).norm() / expected.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048, 8192])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--fp8", action="store_true", help="e4m3 operands, scales per row and column")
    parser.add_argument("--split", action="store_true", help="also tiles of 128 columns whose K is split, and none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "gemm_loopback_h200.csv")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    launch(lambda ranks: _measure(args, ranks))


def _measure(args: argparse.Namespace, ranks: Ranks) -> int:
    matmul_reduce_scatter.kernel_of = all_gather_matmul.kernel_of = kernel_of  # type: ignore[assignment]
    alone, device, rows = Loopback(ranks.device), ranks.device, []
    spaces: dict[str, Any] = {"loopback": alone}
    if ranks.size == WORLD:
        spaces["tpfuse"] = workspace.of(arena.of(ranks.group_name))
    common = ("fp8_row" if args.fp8 else "bf16", torch.cuda.get_device_name(device), torch.__version__)
    ratios: dict[tuple[str, str, bool], list[float]] = {}
    sizes = list(dict.fromkeys(each[1:] for model in args.models for each in layers(model, WORLD) if each[1] in args.ops))
    for m, (op, n, k) in ((m, size) for m in args.rows for size in sizes):
        operands = Operands(dataclasses.replace(ranks, size=WORLD), m, n, k, args.fp8)
        made = {
            "gemm": operands.product,
            **{name: body(space, op, m, operands, args.fp8) for name, space in spaces.items()},
        }
        if args.split:
            for name, split in (("loopback_split", True), ("loopback_unsplit", False)):
                made[name] = body(alone, op, m, operands, args.fp8, split)
        product = made["gemm"](0)
        error = max(wrong(op, product, made[name](0)) for name in made if name.startswith("loopback"))
        if "tpfuse" in made:
            expected = bodies(ranks, op, operands)["nccl"](0).float()
            error = max(error, ((made["tpfuse"](0).float() - expected).norm() / expected.norm()).item())
        torch.cuda.synchronize()
        (error,) = ranks.maximum([error])
        assert not alone.record[0] and error < 1e-2, f"{op} {m} {n} {k}: {error}, {alone.record.tolist()}"
        inner = max(2, min(MOST_CALLS, int(GRAPH_FLOP / (2 * m * n * k))))
        graphs = {name: capture(each, inner)[0] for name, each in made.items()}
        told = []
        for idle in (False, True):
            times = replayed_us(graphs, args.rounds, device, idle_s=REST_S if idle else 0.0)
            us = {name: statistics.median(each) / inner for name, each in times.items()}
            for name in spaces:
                ratios.setdefault((op, name, idle), []).append(us["gemm"] / us[name])
            rows += [(op, m, n, k, *common, idle, name, f"{each:.2f}", commit()) for name, each in us.items()]
            told.append(" ".join(["rested" if idle else "busy", *(f"{name} {each:.1f}" for name, each in us.items())]))
        ranks.say(f"{op} M={m} N={n} K={k}: {', '.join(told)}")
        if ranks.rank == 0:
            write_rows(args.out, FIELDS, rows)
    for (op, name, idle), each in sorted(ratios.items()):
        mean, state = math.prod(each) ** (1 / len(each)), "rested" if idle else "busy"
        ranks.say(
            f"{op} {name} {state}: {mean:.3f} of the GEMM's speed, geometric mean of {len(each)}, {min(each):.3f} at worst"
        )
    return 0


if __name__ == "__main__":
    main()
