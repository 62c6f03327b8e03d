"""What benchmarks of kernels share: ranks, timing behind a GEMM with candidates taking turns, the limit, the results file.

A candidate's time is what it adds to the GEMM whose output it takes: CUDA graphs of [GEMM, candidate] x n and of [GEMM] x n
take turns (see tpfuse/tuner/timing.py). GEMMs go through enough weights that none is in the cache when its turn comes. The
residual of each call is the total of the one before, as in a model.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gc
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from tpfuse.tuner.timing import added_us, replayed_us, slowest_us, turns

LATENCY_US, WIRE_BYTES_PER_US, MEMORY_BYTES_PER_US = 2.5, 380e3, 4.3e6
GEMM_FLOP_PER_US = 6e8
GEMM_ALONE, LIMIT = "gemm", "limit"
WARM_UPS, MOST_CALLS = 2, 20
GROUP_TIMEOUT_S = 120
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Largest relative error (L2, against fp64) of the unfused baseline: a few roundings.
CEILINGS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}
FIELDS = ("op", "rows", "hidden", "k", "dtype", "quant", "world", "gpu", "torch", "candidate", "us", "commit")
RESULTS = pathlib.Path(__file__).resolve().parent / "results"

# -- ranks -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    group_name: str

    def say(self, *what: Any) -> None:
        if self.rank == 0:
            print(*what, flush=True)

    @property
    def machine(self) -> str:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_gpu else platform.machine()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def maximum(self, numbers: Sequence[float]) -> list[float]:
        """For each number the largest of all ranks', the same on every rank. NaN counts as infinite."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device).nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def launch(run: Callable[[Ranks], int], without_gpus: bool = False) -> None:
    """Make the default group, run, take it down in the order that does not hang. Does not return.

    without_gpus  where there is not one for each rank, run on CPU ranks
    """
    if "RANK" not in os.environ:
        sys.exit(f"start it with: torchrun --nproc-per-node 2 {sys.argv[0]}")
    device = _make_group(without_gpus)
    torch.set_grad_enabled(False)
    config: Any = torch._dynamo.config
    config.recompile_limit, config.accumulated_recompile_limit = 512, 4096  # past them it would run eagerly, and silently
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD.group_name)
    try:
        status = run(ranks)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for ranks that are still in a collective; torchrun ends those
    torch._dynamo.reset()  # CUDA graphs that hold NCCL calls would keep the group from ending
    gc.collect()
    ranks.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)


def _make_group(without_gpus: bool) -> torch.device:
    timeout, local_rank = datetime.timedelta(seconds=GROUP_TIMEOUT_S), int(os.environ["LOCAL_RANK"])
    if without_gpus and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


class Budget:
    """Seconds that a benchmark may take; all ranks stop at the same place."""

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        self.ranks, self.seconds, self.start = ranks, seconds, time.monotonic()

    def spent(self) -> bool:
        """Collective."""
        return self.ranks.maximum([time.monotonic() - self.start])[0] > self.seconds

    def elapsed(self) -> str:
        return f"{time.monotonic() - self.start:.0f} s"


# -- what is timed ---------------------------------------------------------------------------------------------------


class Gemm:
    """[rows, k] x [k, hidden], other numbers on each rank: what leaves a partial sum on each of them."""

    def __init__(self, ranks: Ranks, rows: int, hidden: int, k: int, dtype: torch.dtype, inner: int) -> None:
        generator = torch.Generator(ranks.device).manual_seed(1 + ranks.rank)
        random_ = lambda *shape: torch.randn(*shape, device=ranks.device, dtype=dtype, generator=generator)  # noqa: E731
        cache = torch.cuda.get_device_properties(ranks.device).L2_cache_size
        copies = min(inner, math.ceil(2 * cache / (hidden * k * dtype.itemsize)))
        self.input = random_(rows, k)
        self.weights = [random_(hidden, k) * k**-0.5 for _ in range(max(1, copies))]

    def __call__(self, turn: int) -> torch.Tensor:
        return torch.nn.functional.linear(self.input, self.weights[turn % len(self.weights)])


def gemm_us(rows: int, hidden: int, k: int, itemsize: int) -> float:
    """A guess, to choose how often to repeat."""
    return max(2 * rows * hidden * k / GEMM_FLOP_PER_US, hidden * k * itemsize / MEMORY_BYTES_PER_US)


def limit_us(message: int, world: int, memory: int = 0) -> float:
    """Latency + wire + memory time. message: bytes of the tensor that is summed; memory: read or written for the norm."""
    wire = 2 * (world - 1) / world * message
    return LATENCY_US + wire / WIRE_BYTES_PER_US + memory / MEMORY_BYTES_PER_US


def repeats(us: float, rounds: int) -> tuple[int, int]:
    """(calls per graph, rounds) for a call of about so many us."""
    return max(2, min(MOST_CALLS, int(1500 / us))), rounds if us < 500 else max(5, rounds // 2)


# -- correctness -----------------------------------------------------------------------------------------------------


def relative_error(ranks: Ranks, got: Any, expected: Sequence[torch.Tensor]) -> float:
    """The largest over outputs and ranks; infinite if anything is NaN, or None on a rank. Collective."""
    if got is None:
        return max(ranks.maximum([math.inf] * len(expected)))
    outputs = (got,) if isinstance(got, torch.Tensor) else tuple(got)
    assert len(outputs) == len(expected)
    errors = [((o.double() - e).norm() / e.norm()).item() for o, e in zip(outputs, expected, strict=True)]
    return max(ranks.maximum(errors))


def check(
    ranks: Ranks,
    run: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tolerance: float,
) -> tuple[float, str]:
    """(error, why the candidate must not be timed): two calls, the second on memory that was used before. Collective."""
    error = 0.0
    for _ in range(2):
        got, failure = None, "it failed on another rank, or its result is not finite"
        try:
            got = run(*(each.clone() for each in inputs))
        except (RuntimeError, ValueError, AssertionError) as raised:
            failure = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0][:160]}"
        error = max(error, relative_error(ranks, got, expected))
        if math.isinf(error):
            return error, failure
    return error, "" if error <= tolerance else f"WRONG: relative error {error:.2g}, {tolerance:.2g} is allowed"


def allowed(error: float, dtype: torch.dtype) -> float:
    """The error that a candidate may have where the unfused baseline has this one."""
    return max(2 * error, CEILINGS[dtype] / 100)


def right_ones(
    ranks: Ranks, candidates: Mapping[str, Callable], inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> dict[str, Callable]:
    """The candidates that may be timed: with at most twice the error of the first, the unfused baseline."""
    first, ceiling = next(iter(candidates)), CEILINGS[inputs[0].dtype]
    error, why = check(ranks, candidates[first], inputs, expected, ceiling)
    if why:
        raise RuntimeError(f"{first}, the baseline: {why}")
    tolerance = allowed(error, inputs[0].dtype)
    right = {first: candidates[first]}
    for name, run in candidates.items():
        if name != first:
            _, why = check(ranks, run, inputs, expected, tolerance)
            if why:
                ranks.say(f"  {name} is not timed: {why}")
            else:
                right[name] = run
    return right


def drop_wrong(
    ranks: Ranks, times: dict[str, float], outputs: Mapping[str, Any], expected: Sequence[torch.Tensor]
) -> dict[str, float]:
    """``times`` without the candidates whose last outputs are wrong, after all those replays. The first is the baseline."""
    errors = {name: relative_error(ranks, outputs[name], expected) for name in times if name != GEMM_ALONE}
    baseline, dtype = next(iter(errors)), outputs[GEMM_ALONE].dtype
    if not errors[baseline] <= math.sqrt(len(expected) * MOST_CALLS) * CEILINGS[dtype]:
        raise RuntimeError(f"{baseline}, the baseline: relative error {errors[baseline]:.2g} after timing")
    tolerance = allowed(errors[baseline], dtype)
    for name, error in errors.items():
        if not error <= tolerance:
            ranks.say(
                f"  {name} is not counted, WRONG after timing: relative error {error:.2g}, {tolerance:.2g} is allowed"
            )
    return {name: us for name, us in times.items() if errors.get(name, 0) <= tolerance}


# -- timing ----------------------------------------------------------------------------------------------------------


def measure(
    ranks: Ranks,
    gemm: Callable[[int], torch.Tensor],
    candidates: Mapping[str, Callable],
    rounds: int,
    inner: int,
    captured: bool = True,
    residual: torch.Tensor | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """(us of the GEMM alone and what each candidate adds to it, the last outputs of each). The same us on every rank.

    captured  CUDA graphs and device time; False: eager calls and wall-clock time to the end of the last one
    residual  of the first call: candidates are (x, residual) -> (normed, total). None: they are x -> total
    """
    bodies: dict[str, Callable[[int], Any]] = {GEMM_ALONE: gemm}
    for name, run in candidates.items():
        bodies[name] = (lambda turn, run=run: run(gemm(turn))) if residual is None else _chain(gemm, run, residual)
    times, outputs = (_replayed if captured else called_us)(ranks, bodies, rounds, inner)
    alone = times.pop(GEMM_ALONE)
    return {GEMM_ALONE: statistics.median(alone) / inner, **added_us(times, alone, inner)}, outputs


def _chain(gemm: Callable[[int], torch.Tensor], run: Callable, residual: torch.Tensor) -> Callable[[int], Any]:
    total = residual

    def body(turn: int) -> Any:
        nonlocal total
        outputs = run(gemm(turn), residual if turn == 0 else total)
        total = outputs[1]
        return outputs

    return body


def _replayed(
    ranks: Ranks, bodies: Mapping[str, Callable], rounds: int, inner: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    captured = {name: capture(body, inner) for name, body in bodies.items()}
    times = replayed_us({name: graph for name, (graph, _) in captured.items()}, rounds, ranks.device)
    return times, {name: last for name, (_, last) in captured.items()}


def capture(body: Callable[[int], Any], inner: int, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and the outputs of the last one.

    pool  memory that graphs share: a replay of one then overwrites what another computed

    A backward pass cannot be captured while an accumulator of gradients is alive that was made on another stream: the calls
    before run on the same one, and what is left of earlier calls is collected.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(WARM_UPS):
            body(turn)
    torch.cuda.synchronize()
    dist.barrier()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    last = None
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        for turn in range(inner):
            last = body(turn)
    for _ in range(WARM_UPS):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    return graph, last


def called_us(
    ranks: Ranks, bodies: Mapping[str, Callable], rounds: int, inner: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """As ``replayed_us``, of calls: by the host's clock, to the end of the last of them. And the last outputs."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    outputs: dict[str, Any] = {}
    for name in (*bodies, *turns(list(bodies), rounds)):
        ranks.synchronize()
        dist.barrier()
        ranks.synchronize()
        start = time.perf_counter()
        for turn in range(inner):
            outputs[name] = bodies[name](turn)
        ranks.synchronize()
        times[name].append(1e6 * (time.perf_counter() - start))
    return slowest_us({name: each[1:] for name, each in times.items()}, ranks.device), outputs  # the first warms up


# -- results ---------------------------------------------------------------------------------------------------------


class Writer:
    """The results file, row by row: what is measured is on disk if the benchmark is ended."""

    def __init__(self, ranks: Ranks, path: str | os.PathLike) -> None:
        self.path = pathlib.Path(path)
        self.common = {
            "world": ranks.size,
            "gpu": ranks.machine,
            "torch": torch.__version__,
            "commit": commit(),
            "quant": "none",
        }
        self.file = None
        if ranks.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "w", newline="", encoding="utf-8")  # noqa: SIM115  open as long as this object
            self.writer = csv.DictWriter(self.file, FIELDS, lineterminator="\n")
            self.writer.writeheader()

    def add(self, times: Mapping[str, float], **problem: Any) -> None:
        """One row per candidate. problem: op, rows, hidden, k, dtype."""
        if self.file is not None:
            for candidate, us in times.items():
                self.writer.writerow({**self.common, **problem, "candidate": candidate, "us": f"{us:.3f}"})
            self.file.flush()


def write_rows(path: str | os.PathLike, fields: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A results file that is written anew each time: what is measured is on disk if the benchmark is ended."""
    there = pathlib.Path(path)
    there.parent.mkdir(parents=True, exist_ok=True)
    with open(there, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)


def commit() -> str:
    """The commit that runs, as far as it can be known: TPFUSE_COMMIT, else git's."""
    if os.environ.get("TPFUSE_COMMIT"):
        return os.environ["TPFUSE_COMMIT"]
    try:
        call = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(call, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
