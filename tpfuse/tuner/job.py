"""The tuning job on every rank: measure within the budget, choose, save.

    torchrun --nproc-per-node 2 -m tpfuse.tuner       (or: tpfuse tune)

Exit status: 0 saved, 1 could not be saved or a rank failed, 2 nothing to tune on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse import tables
from tpfuse.comm import agreement, arena
from tpfuse.comm.arena import Arena
from tpfuse.errors import ConfigError
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import CANDIDATES, FLASHINFER
from tpfuse.kernels.matmul_candidates import MATMULS, SYMM_MEM
from tpfuse.tables import Choice, Entries, Machine, Size, Table
from tpfuse.tuner import arguments, measure, proposals, selection, sequence_parallel
from tpfuse.tuner.bench_all_reduce import AllReduceBench
from tpfuse.tuner.bench_matmul import MatmulBench
from tpfuse.version import __version__

GROUP_TIMEOUT_S = 300
BASELINE = Choice("nccl")
#: Others' kernels that need memory of their own.
LIBRARIES = (FLASHINFER, SYMM_MEM)
#: Of each (op, size, rows): the times to choose by.
Measured = dict[tuple[str, Size, int], dict[Choice, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuner on this rank; the exit status, the same on every rank."""
    args = arguments.parse(argv)
    if "RANK" not in os.environ:
        sys.exit("tpfuse.tuner: start it with 'tpfuse tune' or 'torchrun --nproc-per-node 2 -m tpfuse.tuner'")
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    why = obstacle(int(os.environ.get("LOCAL_WORLD_SIZE", size)), bool(args.sequence_parallel))
    why = why or arguments.uneven(args, size)
    if why:
        if rank == 0:
            print(f"tpfuse tune: {why}", file=sys.stderr, flush=True)
        return 2
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    if torch.cuda.device_count():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        with torch.no_grad():
            status = _run(args, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for ranks that are still in a collective; torchrun ends those
    dist.destroy_process_group()
    return status


def obstacle(ranks: int, on_cpu: bool = False) -> str:
    """Why so many ranks cannot be tuned on this machine; "" if they can. Touches no device.

    on_cpu  whether CPU ranks will do, where there are no GPUs
    """
    count = torch.cuda.device_count()
    if not count and not on_cpu:
        return "there is no CUDA device, and nothing to choose between on the CPU"
    if ranks < 2:
        return "one rank has nothing to communicate: 2 or more are needed"
    return f"{ranks} ranks need {ranks} CUDA devices, there are {count}" if ranks > count > 0 else ""


def _run(args: argparse.Namespace, rank: int) -> int:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    made: Arena | None = None
    if not args.sequence_parallel or torch.cuda.device_count():
        found = arena.of(group.group_name)
        if isinstance(found, str):
            if rank == 0:
                print(f"tpfuse tune: {found}", file=sys.stderr, flush=True)
            return 2
        made, device = found, found.device
    machine = dispatch.machine_of(device, group.size())
    target = _Target(args.out, args.fresh, machine, group)
    failure = target.probe()  # not only after minutes of measuring
    if not failure:
        with contextlib.closing(_Talk(rank)) as talk:
            if args.sequence_parallel:
                chosen, told = sequence_parallel.tune(args, group, device, talk)
            else:
                assert made is not None
                measured = _measure(args, made, group, talk)
                chosen = choose(measured)
                told = selection.told(chosen, measured, BASELINE.candidate)
        failure = target.save(chosen) if chosen else "no candidate could be measured"
    if failure:
        print(f"tpfuse tune: {failure}", file=sys.stderr, flush=True)
        return 1
    if rank == 0:
        print(f"{told}\n\n{machine}: {target.path}", flush=True)
    return 0


def _measure(args: argparse.Namespace, made: Arena, group: dist.ProcessGroup, talk: _Talk) -> Measured:
    """The times of every size that the budget allows."""
    sizes = _sizes(args, made.world)
    _prepare(made, sizes, () if args.libraries else LIBRARIES, talk)
    measured: Measured = {}
    end = time.monotonic() + args.seconds
    for number, size in enumerate(sizes):
        spent = torch.tensor([float(time.monotonic() > end)], device=made.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group)  # ranks stop together
        if spent.item():
            talk.say(f"{args.seconds:g} s are spent: {number} of {len(sizes)} sizes were measured")
            break
        talk.show(str(size), number, len(sizes))
        candidates = proposals.choices(made, size.problem)
        if not candidates:
            talk.say(f"{size}: no kernel can do that")
            continue
        narrow = lambda times: selection.finalists(times, BASELINE)  # noqa: E731
        first, second = measure.measure(_bench(size, made, group), candidates, narrow, talk.say)
        if second:
            measured[size.key] = second
        if args.verbose:
            talk.say(f"{size}: {_listed(first)}; again: {_listed(second)}")
        torch.cuda.empty_cache()  # the next size is another
    return measured


def _sizes(args: argparse.Namespace, world: int) -> list[Any]:
    plain = [op for op in args.ops if op in CANDIDATES]
    matmuls = [op for op in args.ops if op in MATMULS]
    dtype = {**arguments.DTYPES, **arguments.MATMUL_DTYPES}[args.dtype]
    return [
        *proposals.sizes(plain, args.hidden, args.rows, dtype),
        *proposals.matmul_sizes(matmuls, args.gemm, args.matmul_rows, world, dtype),
    ]


def _bench(size: Any, made: Arena, group: dist.ProcessGroup) -> measure.Bench:
    return (MatmulBench if isinstance(size, proposals.MatmulSize) else AllReduceBench)(size, made, group)


def _prepare(made: Arena, sizes: Sequence[Any], skipped: Collection[str], talk: _Talk) -> None:
    """Make what memory a candidate needs for the largest size that it can do: it is never given back."""
    problems = [size.problem for size in sorted(sizes, key=lambda size: -size.bytes)]
    for op, candidates in proposals.KNOWN.items():
        for candidate in (each for each in candidates.values() if each.name not in skipped):
            whys = []
            for problem in (problem for problem in problems if problem.op == op):
                whys.append(candidate.prepare(made, problem))
                if not whys[-1] and op not in MATMULS:  # which need the most memory for other sizes each
                    break
            if whys and whys[-1]:
                talk.say(f"{op}: {candidate.name} left out: {whys[-1]}")


def choose(measured: Mapping[tuple[str, Size, int], Mapping[Choice, float]]) -> dict[str, dict[Size, Entries]]:
    """The table's entries by operation and size."""
    grouped: dict[str, dict[Size, dict[int, Mapping[Choice, float]]]] = {}
    for (op, size, rows), times in sorted(measured.items(), key=lambda item: item[0]):
        grouped.setdefault(op, {}).setdefault(size, {})[rows] = times
    return {op: {size: selection.entries(by_rows) for size, by_rows in sizes.items()} for op, sizes in grouped.items()}


class _Target:
    """The file that the table goes to. Rank 0 writes; all ranks learn whether it could. Collective."""

    def __init__(self, out: pathlib.Path | None, fresh: bool, machine: Machine, group: dist.ProcessGroup) -> None:
        self.out, self.fresh, self.machine, self.group = out, fresh, machine, group
        self.path = out

    def probe(self) -> str:
        """Why nothing can be written there, on every rank; "" if it can."""
        return self._on_first_rank(self._probe)

    def save(self, chosen: Mapping[str, Mapping[Size, Entries]]) -> str:
        """Write the table, extending one that is there; why not, on every rank."""
        return self._on_first_rank(self._save, chosen)

    def _on_first_rank(self, step: Any, *arguments: Any) -> str:
        failure = ""
        if self.group.rank() == 0:
            try:
                step(*arguments)
            except (OSError, ConfigError) as error:
                failure = f"cannot write the table{f' to {self.path}' if self.path else ''}: {error}"
        return agreement.exchange(self.group, "writing the table", {"failure": failure})[0]["failure"]

    def _probe(self) -> None:
        self.path = self.out or tables.tuned_path(self.machine)
        if self.path.is_dir():
            self.path /= tables.file_name(self.machine)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path.parent):
            pass

    def _save(self, chosen: Mapping[str, Mapping[Size, Entries]]) -> None:
        assert self.path is not None
        before = None
        if not self.fresh:
            try:
                # What is written is all that counts from then on: with the sizes that come with tpfuse.
                before = tables.load(self.path, self.machine) or tables.shipped(self.machine)
            except ConfigError as error:
                print(f"tpfuse tune: written anew: {error}", file=sys.stderr, flush=True)
        tables.save((before or Table(self.machine, {}, {})).replace(chosen, versions()), self.path)


class _Talk:
    """Rank 0's progress bar and messages."""

    def __init__(self, rank: int) -> None:
        self.rank, self.bar = rank, None
        if rank == 0:
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                self.say("(no progress bar: tqdm is not installed)")
            else:
                self.bar = tqdm(unit="size", leave=False, disable=None)  # None: shown on a terminal only

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        elif self.rank == 0:
            print(text, flush=True)

    def show(self, name: str, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.total = total
            self.bar.set_description(name, refresh=False)
            self.bar.update(done - self.bar.n)
            self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def versions() -> dict[str, str]:
    """What a measurement depends on besides the machine."""
    common = {"tpfuse": __version__, "torch": torch.__version__}
    if not torch.cuda.device_count():
        return common
    import triton

    nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
    return {
        **common,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, nccl)),
        "driver": _driver(),
    }


def _driver() -> str:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def _listed(times: Mapping[Choice, float]) -> str:
    return ", ".join(f"{choice} {times[choice]:.2f}" for choice in sorted(times, key=lambda c: times[c]))
