"""What the tests on several GPUs share: calls of the operation with their exact answers, and ranks that can be stopped.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpfuse
from tests.gloo.layers import Stack
from tpfuse import ops
from tpfuse.kernels import dispatch
from tpfuse.ops.all_reduce_rms_norm import reference
from tpfuse.testing import take_device

EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Whether ranks share the only GPU, over gloo. Then a wait for a peer takes milliseconds: long runs are so much shorter.
SHARED = torch.cuda.device_count() == 1
FEWER = 4 if SHARED else 1
_MANY_ROWS = 1024  # above it only some rows are computed in fp64
_CYCLES_PER_SECOND = 2e9  # of a GPU, for delays

Outputs = tuple[torch.Tensor, torch.Tensor]


# -- calls and their answers ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of ``tpfuse.ops.all_reduce_rms_norm`` without its numbers. weight_dtype None: that of the input."""

    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    kernel: str | None = None
    residual: bool = True
    weight: bool = True
    weight_dtype: torch.dtype | None = None
    weight_offset: float = 0.0
    bias: bool = False
    scale: float | None = None
    scale_tensor: bool = False
    normed_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        told = (f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if self._is_special(f))
        return " ".join((f"{self.kernel} {self.dtype} {list(self.shape)}", *told)).replace("torch.", "")

    def _is_special(self, field: dataclasses.Field) -> bool:
        return field.name not in ("shape", "dtype", "kernel") and getattr(self, field.name) != field.default


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Call:
    """A case with numbers: ``parts`` has every rank's input, so that the exact sum needs no collective."""

    def __init__(self, case: Case, group: dist.ProcessGroup | None = None, seed: int = 0) -> None:
        self.case, self.hidden = case, case.shape[-1]
        self.group = dist.group.WORLD if group is None else group
        device = here()
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.parts = [random(*case.shape) for _ in range(self.group.size())]
        self.residual = random(*case.shape) if case.residual else None
        self.weight = random(self.hidden, dtype=case.weight_dtype or case.dtype) if case.weight else None
        self.bias = random(self.hidden) if case.bias else None
        self.factor = torch.tensor(0.75, device=device, dtype=case.dtype) if case.scale_tensor else None

    @property
    def input(self) -> torch.Tensor:
        return self.parts[self.group.rank()]

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.input, self.residual, self.weight, self.bias, self.factor) if t is not None]

    def run(self, kernel: str | None = None, **changes: Any) -> Outputs:
        """By the case's kernel, or by another."""
        case = self.case
        arguments = {
            "input": self.input,
            "weight": self.weight,
            "group": self.group,
            "eps": EPS,
            "residual": self.residual,
            "bias": self.bias,
            "scale": case.scale if self.factor is None else self.factor,
            "weight_offset": case.weight_offset,
            "normed_dtype": case.normed_dtype,
            "out_dtype": case.out_dtype,
            "kernel": kernel or case.kernel,
        }
        return ops.all_reduce_rms_norm(**{**arguments, **changes})

    def plain(self) -> Outputs:
        """By the group's backend and eager maths, over the default group: its ranks are those of every group here."""
        case, name = self.case, dist.group.WORLD.group_name
        modifiers = (self.residual, self.bias, case.scale, self.factor, case.weight_offset)
        return reference(self.input, self.weight, name, EPS, *modifiers, case.normed_dtype, case.out_dtype)

    def exact(self, rows: torch.Tensor | slice) -> Outputs:
        """Some rows of both results, in fp64."""
        total = sum(_rows(part, rows).double() for part in self.parts)
        if self.bias is not None:
            total = total + self.bias.double()
        if self.case.scale is not None:
            total = total * self.case.scale
        if self.factor is not None:
            total = total * self.factor.double()
        if self.residual is not None:
            total = total + _rows(self.residual, rows).double()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        if self.weight is not None:
            normed = normed * (self.weight.double() + self.case.weight_offset)
        return normed, total


def _rows(tensor: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[rows]


def excess(got: torch.Tensor, plain: torch.Tensor | None, exact: torch.Tensor) -> float:
    """The error of ``got`` over what is allowed: at most 1 is right.

    Allowed is twice the plain implementation's error, or that of rounding once where it is larger (plain results may be
    right by luck), and a few roundings of fp32, in which everything is accumulated.
    """
    largest = lambda t: t.abs().max().item()  # noqa: E731
    typical = lambda t: t.square().mean().sqrt().item()  # noqa: E731
    once = torch.finfo(got.dtype).eps / 2 * largest(exact)
    measures = [(largest, once, 8)]
    if exact.numel() >= 4096:
        measures.append((typical, typical(exact.to(got.dtype).double() - exact), 4))
    ratios = []
    for measure, rounding, roundings in measures:
        others = measure(plain.double() - exact) if plain is not None else 0.0
        allowed = 2 * max(others, rounding) + roundings * 2**-24 * measure(exact) + 1e-40
        ratios.append(measure(got.double() - exact) / allowed)
    return max(ratios) if all(ratio == ratio for ratio in ratios) else float("nan")


def judge(call: Call, plain: bool = True, **changes: Any) -> str:
    """What is wrong with a call, empty if nothing is: its numbers, its bits, on other ranks and in another run, aliasing.

    plain    whether there is a plain result to compare with (it needs much memory)
    changes  of the arguments, for ``Call.run``
    Collective over the default group.
    """
    case, told = call.case, []
    before = [tensor.clone() for tensor in call.tensors()] if plain else []
    got, again = call.run(**changes), call.run(**changes)
    count = call.input.numel() // call.hidden
    rows = _some(count) if count > _MANY_ROWS else torch.arange(count, device=here())
    others, exact = call.plain() if plain else (None, None), call.exact(rows)
    for i, name in enumerate(("normed", "total")):
        dtype = case.out_dtype or case.dtype if name == "normed" else case.dtype
        if got[i].shape != case.shape or got[i].dtype != dtype or not got[i].is_contiguous():
            told.append(f"{name} is {got[i].dtype} {list(got[i].shape)} {got[i].stride()}")
            continue
        ratio = excess(_rows(got[i], rows), None if others[i] is None else _rows(others[i], rows), exact[i])
        if not ratio <= 1:
            told.append(f"{name} has {ratio:.3g} of the allowed error")
        if others[i] is not None and count > _MANY_ROWS and not _alike(got[i], others[i]):
            told.append(f"{name} differs from the plain result in some row")
        if differ(got[i], again[i]).item():
            told.append(f"{name} has other bits in a second run")
        if not same_on_all_ranks(got[i]):
            told.append(f"{name} has other bits on another rank")
    if any(differ(old, new).item() for old, new in zip(before, call.tensors(), strict=False)):
        told.append("an argument was written to")
    if _aliases(*got, *call.tensors()) or _aliases(got[1], *call.tensors()):
        told.append("a result aliases an argument or the other result")
    return f"{case}: {'; '.join(told)}" if told else ""


def _some(count: int) -> torch.Tensor:
    """The first and the last two rows, and some in between; the same on every rank."""
    generator = torch.Generator().manual_seed(count)
    between = torch.randint(2, count - 2, (60,), generator=generator)
    return torch.cat([torch.tensor([0, 1, count - 2, count - 1]), between]).to(here())


def _alike(got: torch.Tensor, plain: torch.Tensor) -> bool:
    """To within a few roundings of the largest value."""
    limit = 8 * torch.finfo(got.dtype).eps * plain.abs().max()
    return bool(((got - plain).abs().max() <= limit).item())


def _aliases(first: torch.Tensor, *others: torch.Tensor) -> bool:
    return any(first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


# -- bits ----------------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in one dimension: NaN equals NaN, and 0.0 is not -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs: a boolean on the device, which nothing has waited for."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.ones((), dtype=torch.bool, device=one.device)
    return (bits(one) != bits(other)).any()


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    """Collective over the default group. Of much data only a part and a sum are compared."""
    mine = bits(tensor)
    if mine.numel() > 1 << 30:
        digest = mine.view(torch.int32).sum(dtype=torch.int64).reshape(1).view(torch.uint8)
        mine = torch.cat([digest, mine[: 1 << 20], mine[-(1 << 20) :]])
    if not mine.numel():
        return True
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return all(torch.equal(part, mine) for part in parts)


# -- what the checks of one spawn are made of ---------------------------------------------------------------------------


@contextlib.contextmanager
def noted(found: dict[str, list[str]], name: str) -> Iterator[list[str]]:
    """A list for what one check finds wrong. An exception ends the check, is noted, and lets the next one begin."""
    told = found.setdefault(name, [])
    try:
        yield told
    except Exception:
        told.append(traceback.format_exc(limit=-6))


def right(told: list[str], *found: str) -> None:
    """Note the findings that are not empty."""
    told += [each for each in found if each]


def error_of(function: Callable, *args: Any, **kwargs: Any) -> str:
    """Type and text of the tpfuse error that a call ends in, empty if it ends well."""
    try:
        function(*args, **kwargs)
    except tpfuse.TpfuseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def seconds_of_100_looks(group: dist.ProcessGroup) -> float:
    """How long it takes to ask 100 times for what a group has."""
    start = time.monotonic()
    for _ in range(100):
        dispatch.of(group.group_name)
    return time.monotonic() - start


def delay(seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


def compile_ahead(calls: Sequence[Callable[[], Any]]) -> None:
    """Compile the kernels of calls that name one of ours or NCCL, each on one rank only; the others find them on disk."""
    from tpfuse.kernels import candidates
    from tpfuse.kernels.triton import own

    local = mock.patch.object(candidates, "_nccl_plain", lambda arena, choice, input: input)
    with local, mock.patch.object(own, "_launch", lambda *args: None):
        for index, call in enumerate(calls):
            if index % dist.get_world_size() == dist.get_rank():
                call()
    dist.barrier(device_ids=[torch.cuda.current_device()])


class CudaStack(Stack):
    """Hand-written layers on the GPU: the same weights and inputs as on the CPU."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(group, **options)
        self.to(here())

    def _full_inputs(self, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super()._full_inputs(shape, seed)
        return x.to(here()), residual.to(here())


# -- ranks that can be stopped -------------------------------------------------------------------------------------------


class Ranks:
    """A process per rank, for ``function(rank, pipe)``. They end without ending their group, which may be broken.

    The function may send and receive by the pipe; what it returns is the last that ``hear`` gives.
    """

    def __init__(self, function: Callable, world_size: int = 2, timeout_s: float = 60.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes, self._pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (theirs, function, rank, world_size, self._store.port, timeout_s)
            self.processes.append(context.Process(target=_rank, args=args, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def hear(self, rank: int, timeout_s: float) -> Any:
        """What the rank says next. Raises AssertionError: nothing in time, it failed or it died."""
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} said nothing for {timeout_s} s"
        try:
            succeeded, value = self._pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(5)
            raise AssertionError(f"rank {rank} ended with exit code {self.processes[rank].exitcode}") from None
        assert succeeded, f"rank {rank}:\n{value}"
        return value

    def tell(self, rank: int, message: Any) -> None:
        self._pipes[rank].send(message)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.signal(rank, signal.SIGCONT)
                process.kill()
            process.join(10)


def _rank(pipe: Any, function: Callable, rank: int, world_size: int, port: int, timeout_s: float) -> None:
    try:
        torch.set_num_threads(1)
        backend = take_device(rank, world_size)
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore("localhost", port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        pipe.send((True, function(rank, pipe)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)
