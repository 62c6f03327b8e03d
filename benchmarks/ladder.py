"""The ladder: every way to compute an all-reduce, with or without add and RMSNorm, as functions.

    nccl            dist.all_reduce, then add and norm compiled by torch: the unfused graph, candidate 0
    nccl_symm       the same over a window of symmetric memory, the copy into it counted
    nccl_norm       dist.all_reduce, then our norm kernel (what dispatch calls nccl)
    torch_symm_mem  torch's symmetric-memory all-reduce with its copy, then our norm kernel
    flashinfer      FlashInfer; flashinfer_pdl: with programmatic dependent launch, which the product uses from 0.7.4 on
    tpfuse_split, tpfuse_ring   our kernels in their default layout
    dispatch        what tpfuse chooses, through its public operation

Those with a norm take a partial sum and the residual, the others a partial sum, which they may overwrite.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from timing import Ranks

from tpfuse.comm import agreement
from tpfuse.kernels import dispatch, flashinfer, symm_mem
from tpfuse.kernels.candidates import ALL_REDUCE, ALL_REDUCE_RMS_NORM, CANDIDATES, Problem
from tpfuse.kernels.dispatch import Dispatcher
from tpfuse.ops import all_reduce_rms_norm
from tpfuse.tables import Choice

EPS = 1e-5
PLAIN = ("nccl", "torch_symm_mem_one_shot", "torch_symm_mem_two_shot", "tpfuse_ring", "dispatch")
WITH_NORM = (
    "nccl", "nccl_symm", "torch_symm_mem", "flashinfer", "flashinfer_pdl", "tpfuse_split", "tpfuse_ring", "dispatch"
)  # fmt: skip
_OWN_NAMES = {"nccl_norm": "nccl"}  # ours -> that of CANDIDATES


@torch.compile(fullgraph=True)
def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return wide.to(x.dtype) * weight, total


def norm_problem(rows: int, hidden: int, dtype: torch.dtype) -> Problem:
    return Problem(ALL_REDUCE_RMS_NORM, rows, hidden, dtype, weight_dtype=dtype, normed_dtype=dtype)


class Ladder:
    """Everything that is made once for all sizes. Collective."""

    def __init__(self, ranks: Ranks, wanted: Sequence[str]) -> None:
        found = dispatch.of(ranks.group_name)
        if not isinstance(found, Dispatcher):
            raise RuntimeError(f"no arena: {found}")
        self.ranks, self.wanted = ranks, tuple(wanted)
        self.dispatcher, self.arena = found, found.arena
        self._window: torch.Tensor | None = None
        self._pool: Any = None
        self._backend: Any = dist.group.WORLD._get_backend(ranks.device)
        config: Any = torch._dynamo.config
        config.automatic_dynamic_shapes = False  # the baseline is compiled per hidden size, for any number of rows
        ranks.say(f"dispatch goes by: {found.source}")

    def prepare(self, largest: Problem) -> None:
        """Memory of the libraries for problems up to this one: all at once, for what is too small is kept."""
        if largest.op == ALL_REDUCE_RMS_NORM and any(name.startswith("flashinfer") for name in self.wanted):
            self._tell("flashinfer", flashinfer.prepare(self.arena, largest))
        if any(name.startswith("torch_symm_mem") for name in self.wanted):
            in_bf16 = dataclasses.replace(largest, dtype=torch.bfloat16)  # fp16 it cannot do at all
            self._tell("torch_symm_mem", symm_mem.prepare(self.arena, in_bf16))
        if "nccl_symm" in self.wanted:
            self._tell("nccl_symm", self._make_window(largest.rows * largest.row_bytes))

    def close(self) -> None:
        """Give NCCL its window back, before the group ends. Collective."""
        if self._pool is not None:
            torch.cuda.synchronize()
            self._backend.deregister_mem_pool(self._pool)
            self._window = self._pool = None

    def _tell(self, name: str, reason: str) -> None:
        if reason:
            self.ranks.say(f"{name} is left out: {reason}")

    def _make_window(self, size: int) -> str:
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            return "NCCL_NVLS_ENABLE is not 0, so NCCL's symmetric kernels might use multicast"
        reason = ""
        try:
            pool = torch.cuda.MemPool(self._backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                window = torch.zeros(size, dtype=torch.uint8, device=self.ranks.device)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        reason = self._agreed(reason)
        if reason:
            return reason
        try:
            self._backend.register_mem_pool(pool, symm=True)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        reason = self._agreed(reason)
        if not reason:
            self._pool, self._window = pool, window
        return reason

    def _agreed(self, reason: str) -> str:
        everybody = agreement.exchange(dist.group.WORLD, "benchmark", {"reason": reason})
        return "; ".join(each["reason"] for each in everybody if each["reason"])

    # -- with add and norm -------------------------------------------------------------------------------------------

    def with_norm(self, problem: Problem, weight: torch.Tensor) -> dict[str, Callable]:
        """Those of the wanted that can do the problem: (x, residual) -> (normed, total). The first is ``nccl``."""
        rest = (None, None, None, 0.0, problem.dtype, None)
        known, group = CANDIDATES[ALL_REDUCE_RMS_NORM], self.ranks.group_name
        found: dict[str, Callable] = {"nccl": self._unfused(problem, weight)}
        for name in self.wanted:
            own = _OWN_NAMES.get(name, name)
            if own in known and name != "nccl":
                if not known[own].cannot(self.arena, problem):
                    choice, run = Choice(own), known[own].run
                    found[name] = lambda x, r, run=run, choice=choice: run(self.arena, choice, x, weight, EPS, r, *rest)
            elif name == "flashinfer_pdl":
                if not known["flashinfer"].cannot(self.arena, problem):
                    found[name] = lambda x, r: flashinfer.all_reduce_rms_norm(
                        self.arena, x, weight, EPS, r, *rest, pdl=True
                    )
            elif name == "nccl_symm":
                if self._window is not None:
                    found[name] = self._over_window(problem, weight)
            elif name == "dispatch":
                found[name] = lambda x, r: all_reduce_rms_norm(
                    x, weight, group=group, eps=EPS, residual=r, normed_dtype=problem.dtype
                )
        return found

    def _unfused(self, problem: Problem, weight: torch.Tensor) -> Callable:
        self._compile(problem, weight)

        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            dist.all_reduce(x)
            return _add_norm(x, residual, weight)

        return run

    def _over_window(self, problem: Problem, weight: torch.Tensor) -> Callable:
        assert self._window is not None
        part = self._window[: problem.rows * problem.row_bytes].view(problem.dtype).view(problem.rows, problem.hidden)

        def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            part.copy_(x)
            dist.all_reduce(part)
            return _add_norm(part, residual, weight)

        return run

    def _compile(self, problem: Problem, weight: torch.Tensor) -> None:
        """Compile add and norm for this hidden size and any number of rows (1: for itself), if they have not been yet."""
        x, r = (weight.new_zeros(problem.rows, problem.hidden) for _ in range(2))
        if x.shape[0] > 1:
            for tensor in (x, r):
                torch._dynamo.mark_dynamic(tensor, 0)
        _add_norm(x, r, weight)

    # -- plain -------------------------------------------------------------------------------------------------------

    def plain(self, problem: Problem) -> dict[str, Callable]:
        """Those of the wanted that can do the problem: x -> the sum. The first is ``nccl``."""
        known = CANDIDATES[ALL_REDUCE]
        found: dict[str, Callable] = {"nccl": _all_reduce}
        can = {name: not each.cannot(self.arena, problem) for name, each in known.items()}
        if can["torch_symm_mem"]:
            found["torch_symm_mem_one_shot"] = lambda x: symm_mem.all_reduce(self.arena, x, one_shot=True)
            found["torch_symm_mem_two_shot"] = lambda x: symm_mem.all_reduce(self.arena, x, one_shot=False)
        if can["tpfuse_ring"]:
            found["tpfuse_ring"] = lambda x: known["tpfuse_ring"].run(self.arena, Choice("tpfuse_ring"), x)
        chosen = self.dispatcher.choose(problem)
        if chosen is not None:
            candidate, choice = chosen
            found["dispatch"] = lambda x: candidate.run(self.arena, choice, x)
        return {name: run for name, run in found.items() if name == "nccl" or name in self.wanted}

    def chosen(self, problem: Problem) -> str:
        """What dispatch takes, in its own words."""
        found = self.dispatcher.choose(problem)
        if found is None:
            return "nothing"
        _, choice = found
        layout = [f"{n}{v}" for n, v in zip("wbr", (choice.warps, choice.blocks, choice.registers), strict=True) if v]
        return "/".join((choice.candidate, *layout))


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def reference_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in fp64. Collective."""
    total = x.double()
    dist.all_reduce(total)
    return total


def reference_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) in fp64. Collective."""
    total = reference_sum(x) + residual.double()
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * weight.double(), total
