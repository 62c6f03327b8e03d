"""Which candidate runs, for this group and this call, decided from values that all ranks of the group share.

At compile time ``of`` makes a group's arena and settles which table its ranks go by, ``obstacle`` says whether a site can
be fused at all, ``may_run`` what would run there. At run time ``choose`` picks by the size of the call; the choice is
remembered per kind of call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpfuse import tables
from tpfuse.comm import agreement, arena, groups
from tpfuse.comm.arena import Arena
from tpfuse.errors import ConfigError
from tpfuse.kernels import REFERENCE
from tpfuse.kernels.candidates import (
    ALL_REDUCE,
    ALL_REDUCE_RMS_NORM,
    ALL_REDUCE_RMS_NORM_QUANTIZE_FP8,
    ANY,
    CANDIDATES,
    NOT_PREPARED,
    Candidate,
    Problem,
    Wish,
)
from tpfuse.kernels.fp8 import Fp8
from tpfuse.tables import Choice, Machine, Table

_MOST_CHOICES = 4096
_RULE_BYTES = 256 << 10
_MOST_PREPARED_ROWS = 8192  # larger calls are left to kernels that need no memory of their own
_UNKNOWN: Any = object()


class Dispatcher:
    """The choices of one group."""

    def __init__(self, arena: Arena, table: Table | None, source: str) -> None:
        self.arena, self.table, self.source = arena, table, source
        self._chosen: dict[tuple, Any] = {}

    def choose(self, problem: Problem, wish: Wish = ANY) -> tuple[Candidate, Choice] | None:
        """The candidate for a problem, and how it is laid out; None: none can do it.

        Raises ConfigError: the kernel that is wished for cannot do it.
        """
        known, pinned = CANDIDATES[problem.op], wish.kernel
        if pinned is not None and not wish.forbids(pinned, problem):
            why = f"the kernels are {', '.join(known)}"
            if pinned in known:  # after what memory it needs has been made
                why = known[pinned].prepare(self.arena, problem) or known[pinned].cannot(self.arena, problem)
            if why:
                raise ConfigError(f"kernel {pinned!r} cannot run {problem.op}: {why}")
            return known[pinned], Choice(pinned)
        choice = self._by_table(problem)
        for each in (choice, self._by_rule(problem), Choice("tpfuse_ring"), Choice("nccl")):
            able = each is not None and each.candidate in known and not wish.forbids(each.candidate, problem)
            if each is not None and able and not known[each.candidate].cannot(self.arena, problem):
                return known[each.candidate], each
        return None

    def prepare(self, problems: Sequence[Problem], wish: Wish = ANY) -> None:
        """Make the memory of every library that the table chooses for one of the problems, for the largest of those."""
        prepared = set()
        for problem in sorted(problems, key=lambda each: -each.rows) if self.table else ():
            choice = self._by_table(problem)
            candidate = CANDIDATES[problem.op].get(choice.candidate) if choice else None
            if candidate is None or candidate.name in prepared or wish.forbids(candidate.name, problem):
                continue
            if problem.rows <= _MOST_PREPARED_ROWS:
                candidate.prepare(self.arena, problem)
                prepared.add(candidate.name)

    def all_reduce(self, kernel: str | None, input: torch.Tensor) -> torch.Tensor:
        """Run the plain all-reduce of at least one element."""
        key = (input.numel(), input.dtype, kernel)
        found = self._chosen.get(key)
        if found is None:
            found = self.remember(key, self.choose(Problem(ALL_REDUCE, input.numel(), 1, input.dtype), Wish(kernel)))
            assert found is not None  # NCCL can do everything
        candidate, choice = found
        return candidate.run(self.arena, choice, input)

    def remembered(self, key: tuple) -> Any:
        """What was chosen for this kind of call before, None if nothing was."""
        return self._chosen.get(key)

    def remember(self, key: tuple, found: Any) -> Any:
        """``found``, which is what calls of this kind get from now on."""
        if len(self._chosen) >= _MOST_CHOICES:
            self._chosen.clear()
        self._chosen[key] = found
        return found

    def _by_table(self, problem: Problem) -> Choice | None:
        """What was measured to be the fastest; a norm that is quantised, too, goes by the norm alone unless it was
        measured itself."""
        if self.table is None:
            return None
        found = self.table.choose(problem.op, problem.rows, problem.row_bytes)
        if found is None and problem.op == ALL_REDUCE_RMS_NORM_QUANTIZE_FP8:
            found = self.table.choose(ALL_REDUCE_RMS_NORM, problem.rows, problem.row_bytes)
        return found

    def _by_rule(self, problem: Problem) -> Choice:
        """Without a table: our kernels while every rank sends little, NCCL above (it overlaps) and where no norm
        follows."""
        message = problem.rows * problem.row_bytes * (self.arena.world - 1)
        if message > _RULE_BYTES or problem.op == ALL_REDUCE:
            return Choice("nccl")
        return Choice("tpfuse_split" if problem.rows <= 4 else "tpfuse_ring")

    def all_reduce_rms_norm(self, wish: Wish, input: torch.Tensor, *arguments: Any, fp8: Fp8 | None = None) -> Any:
        """Run the operation on at least one row; arguments as in ``tpfuse.ops``. None: only its reference can.

        fp8  what its rows are quantised to: then it is ``all_reduce_rms_norm_quantize_fp8``
        """
        weight, _, _, bias, scale, scale_tensor, _, normed_dtype, out_dtype = arguments
        modified = bias is not None or scale is not None or scale_tensor is not None
        weight_dtype = None if weight is None else weight.dtype
        how = None if fp8 is None else fp8.how
        key = (input.shape, input.dtype, weight_dtype, normed_dtype, out_dtype, modified, wish, how)
        found = self._chosen.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            hidden = input.shape[-1]
            problem = Problem(
                ALL_REDUCE_RMS_NORM if how is None else ALL_REDUCE_RMS_NORM_QUANTIZE_FP8,
                input.numel() // hidden, hidden, input.dtype, weight_dtype, normed_dtype, out_dtype, modified, how,
            )  # fmt: skip
            found = self.remember(key, self.choose(problem, wish))
        if found is None:
            return None
        candidate, choice = found
        return candidate.run(self.arena, choice, input, *arguments, **({} if fp8 is None else {"fp8": fp8}))


_dispatchers: weakref.WeakKeyDictionary[dist.ProcessGroup, Dispatcher | str] = weakref.WeakKeyDictionary()


def of(group_name: str, arena_bytes: int = arena.DEFAULT_BYTES) -> Dispatcher | str:
    """The dispatcher of a group, or why nothing of ours can run there. The first call for a group is collective."""
    group = groups.resolve(group_name)
    found = _dispatchers.get(group)
    if found is None:
        found = _make(group, arena_bytes)
        if not arena.is_passing(found):
            _dispatchers[group] = found
    return found


def _make(group: dist.ProcessGroup, arena_bytes: int) -> Dispatcher | str:
    made = arena.of(group.group_name, arena_bytes)
    if isinstance(made, str):
        return made
    machine = machine_of(made.device, made.world)
    table, source = tables.find(machine)
    mine = {"machine": str(machine), "table": table.digest if table else ""}
    everybody = agreement.exchange(group, "choosing a table", mine)
    if len({each["machine"] for each in everybody}) > 1:
        table, source = None, "the ranks' devices differ: no table holds for them"
    elif len({each["table"] for each in everybody}) > 1:
        table, source = tables.shipped(machine), "ranks have different tuned tables: all go by what ships with tpfuse"
    return Dispatcher(made, table, source)


def refuse(op: str, kernel: str | None, group_name: str, reason: str) -> None:
    """Raises ConfigError: a kernel was asked for by name, and the group has nothing to run it with."""
    if kernel not in (None, "nccl") and groups.size(group_name) > 1:
        raise ConfigError(f"kernel {kernel!r} cannot run {op}: {reason}")


class _Watched(dict):
    """The remembered choices, telling which are taken."""

    def __init__(self, choices: dict, names: list[str]) -> None:
        super().__init__(choices)
        self._names = names

    def get(self, key: Any, default: Any = None) -> Any:
        return self._tell(super().get(key, default))

    def __setitem__(self, key: Any, found: Any) -> None:
        super().__setitem__(key, self._tell(found))

    def _tell(self, found: Any) -> Any:
        if isinstance(found, tuple):
            self._names.append(found[0].name)
        return found


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Names of the candidates that calls in this block take, in their order; calls outside cost no more for it."""
    names: list[str] = []
    made = [each for each in _dispatchers.values() if isinstance(each, Dispatcher)]
    for each in made:
        each._chosen = _Watched(each._chosen, names)
    try:
        yield names
    finally:
        for each in made:
            each._chosen = dict(each._chosen)


def obstacle(group_name: str, device_type: str) -> str:
    """Why no operation can be computed for that group on that kind of device; "" if they can."""
    if device_type == "cpu":
        return ""
    if device_type != "cuda":
        return f"no kernel for {device_type} in this version"
    found = of(group_name)
    return found if isinstance(found, str) else ""


def cannot(group_name: str, device_type: str, problem: Problem, kernel: str) -> str:
    """Why a candidate cannot do a problem, where there is no obstacle; "" if it can."""
    found = of(group_name) if device_type != "cpu" else ""
    return "" if isinstance(found, str) else CANDIDATES[problem.op][kernel].cannot(found.arena, problem)


def may_run(group_name: str, device_type: str, problem: Problem, most_rows: int, wish: Wish = ANY) -> list[str]:
    """Names of what runs calls of ``problem.rows`` to ``most_rows`` rows, fewest rows first, where there is no obstacle.

    Where it is NCCL alone, nothing is won by fusing: the unfused graph does the same, and Inductor may fuse the norm with
    what follows it. Makes what memory the libraries among them need: collective. That of a kernel that is wished for, and
    whether it can do the call at all, waits for the call.
    """
    if device_type == "cpu":
        return [REFERENCE]
    found = of(group_name)
    assert isinstance(found, Dispatcher), found
    counts = {most_rows, *(problem.rows << n for n in range(most_rows.bit_length()) if problem.rows << n < most_rows)}
    if wish.flashinfer_bytes is not None:
        counts.add(min(most_rows, max(problem.rows, wish.flashinfer_bytes // problem.row_bytes)))
    problems = [dataclasses.replace(problem, rows=count) for count in sorted(counts)]
    free = [each for each in problems if wish.kernel is None or wish.forbids(wish.kernel, each)]
    names = [wish.kernel] if wish.kernel is not None and len(free) < len(problems) else []
    found.prepare(free, wish)
    chosen = [found.choose(each, wish) for each in free]
    return list(dict.fromkeys([*names, *(REFERENCE if each is None else each[0].name for each in chosen)]))


def told(group_name: str, problem: Problem, names: Sequence[str], wish: Wish = ANY) -> str:
    """One line on ``names``, which ``may_run`` gave, and why not the other candidates."""
    found = of(group_name)
    assert isinstance(found, Dispatcher), found
    reasons: dict[str, list[str]] = {}
    for name, candidate in CANDIDATES[problem.op].items():
        if name not in names:
            why = candidate.cannot(found.arena, problem)
            if wish.forbids(name, problem):
                why = f"for messages of at most {wish.flashinfer_bytes} bytes"
            elif not why or why == NOT_PREPARED:
                chooser = "the table" if found.table else "the rule without a table"
                why = f"{wish.kernel} was asked for" if wish.kernel is not None else f"{chooser} chose others"
            reasons.setdefault(why, []).append(name)
    others = "; ".join(f"{', '.join(each)} ({why})" for why, each in reasons.items())
    return f"{problem.op} of [T, {problem.hidden}] {problem.dtype} over {group_name!r}: {', '.join(names)}; not {others}"


def machine_of(device: torch.device, world: int) -> Machine:
    """What a table for so many ranks on such devices is for."""
    if device.type == "cuda":
        return Machine(torch.cuda.get_device_name(device), link(), world)
    return Machine(platform.machine() or device.type, "host", world)


@functools.cache
def link() -> str:
    """How the GPUs that this process sees are connected."""
    try:
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except (ImportError, AttributeError, RuntimeError):
        return "unknown"
    return "nvlink" if any(any(row) for row in matrix) else "pcie"
