"""Our GEMM kernels on a single GPU, each with itself as its only peer, beside cuBLAS's GEMM alone.

    python benchmarks/gemm_loopback.py                                  # five models' shapes at two ranks, bf16
    python benchmarks/gemm_loopback.py --fp8 --rows 2048 8192

A kernel pushes to its own memory what it would push to a peer, waits for that and adds it: everything is as on two GPUs but
the wire and the other rank. What it takes beyond the GEMM alone is what the kernel itself costs. Tilings go by the rule
that holds without a table.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import tempfile
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gemm_overlap import GATHER, GRAPH_FLOP, MODELS, MOST_CALLS, OPS, SCATTER, Operands, layers
from timing import RESULTS, Ranks, capture, commit, replayed_us, write_rows

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
    return build.kernel(files, files[-1].partition(".")[0], macros, shared_bytes, space.arena.device.index)


def bodies(space: Loopback, op: str, m: int, operands: Operands, fp8: bool) -> dict[str, Callable[[int], Any]]:
    """The GEMM alone, and the kernel."""

    def ours(turn: int) -> torch.Tensor:
        weight, dtype = operands.weight(turn), torch.bfloat16
        if op == GATHER:
            own = operands.shard_options
            scales = (own["input_scale"], own["weight_scales"], dtype) if fp8 else ()
            return all_gather_matmul.all_gather_matmul(space, operands.shard, [weight], m, [], False, *scales)[0]  # type: ignore[arg-type]
        own = operands.whole_options
        scales = ((own["input_scale"], own["weight_scale"]), dtype) if fp8 else ()
        arguments = (space, operands.whole, weight, None, m // WORLD, *scales)
        return matmul_reduce_scatter.matmul_reduce_scatter(*arguments, all_rows=op not in (GATHER, SCATTER))

    return {"gemm": operands.product, "loopback": ours}


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "gemm_loopback_h200.csv")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=device)
        _measure(args, device)
        dist.destroy_process_group()


def _measure(args: argparse.Namespace, device: torch.device) -> None:
    matmul_reduce_scatter.kernel_of = all_gather_matmul.kernel_of = kernel_of  # type: ignore[assignment]
    space, ranks, rows = Loopback(device), Ranks(0, WORLD, device, ""), []
    common = ("fp8_row" if args.fp8 else "bf16", torch.cuda.get_device_name(device), torch.__version__)
    ratios: dict[tuple[str, bool], list[float]] = {}
    sizes = list(dict.fromkeys(each[1:] for model in args.models for each in layers(model, WORLD) if each[1] in args.ops))
    for m, (op, n, k) in ((m, size) for m in args.rows for size in sizes):
        made = bodies(space, op, m, Operands(ranks, m, n, k, args.fp8), args.fp8)
        error = wrong(op, made["gemm"](0), made["loopback"](0))
        torch.cuda.synchronize()
        assert not space.record[0] and error < 1e-2, f"{op} {m} {n} {k}: {error}, {space.record.tolist()}"
        inner = max(2, min(MOST_CALLS, int(GRAPH_FLOP / (2 * m * n * k))))
        graphs = {name: capture(body, inner)[0] for name, body in made.items()}
        told = []
        for idle in (False, True):
            times = replayed_us(graphs, args.rounds, device, idle_s=REST_S if idle else 0.0)
            us = {name: statistics.median(each) / inner for name, each in times.items()}
            ratios.setdefault((op, idle), []).append(us["gemm"] / us["loopback"])
            rows += [(op, m, n, k, *common, idle, name, f"{each:.2f}", commit()) for name, each in us.items()]
            told.append(f"{'rested' if idle else 'busy'} {us['gemm']:.1f} {us['loopback']:.1f} {ratios[op, idle][-1]:.3f}")
        print(f"{op} M={m} N={n} K={k}: {', '.join(told)}", flush=True)
        write_rows(args.out, FIELDS, rows)
    for (op, idle), each in sorted(ratios.items()):
        mean, of_what = math.prod(each) ** (1 / len(each)), f"{op}, {'rested' if idle else 'busy'}"
        print(f"{of_what}: {mean:.3f} of the GEMM's speed, geometric mean of {len(each)} sizes, {min(each):.3f} at worst")


if __name__ == "__main__":
    main()
