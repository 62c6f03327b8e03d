"""All-reduce + RMSNorm + FP8 by every kernel: the bytes that eager operations make of what the plain operation gives.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`. A check notes what it finds wrong and goes on, so
that no rank is left alone in a collective.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # torchrun puts this file's folder there

from tests.multigpu.checks import (
    BF16,
    EPS,
    FP16,
    FP32,
    Call,
    Case,
    bits,
    compile_ahead,
    differ,
    error_of,
    here,
    noted,
    right,
    same_on_all_ranks,
)
from tpfuse import ops
from tpfuse.kernels import dispatch
from tpfuse.ops import Recipe
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import OP
from tpfuse.ops.quantize_fp8 import quantized
from tpfuse.testing import spawn, under_torchrun

SPLIT, RING, NCCL = "tpfuse_split", "tpfuse_ring", "nccl"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STATIC = None
#: A group of 0 stands for the row's size, and bf16 for the row's dtype.
RECIPES = {
    "row": Recipe(group=0, scale_dtype=BF16),
    "row in fp32": Recipe(group=0, zero_to_one=True),
    "group": Recipe(group=128, scale_dtype=BF16),
    "group by reciprocal": Recipe(group=128, floor=1e-4, by_reciprocal=True),
    "group of 64, powers of two": Recipe(group=64, power_of_two=True),
    "static": STATIC,
}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How a call quantises."""

    recipe: Recipe
    scale: torch.Tensor | None
    dtype: torch.dtype = E4M3

    @classmethod
    def of(cls, name: str, case: Case, fp8: torch.dtype = E4M3) -> Wanted | None:
        """None: rows of that size have no such groups, or that kernel cannot do them."""
        recipe, hidden = RECIPES[name], case.shape[-1]
        if recipe is STATIC:
            return cls(Recipe(), torch.full((1,), 0.017, device=here()), fp8)
        if recipe.scale_dtype == BF16:
            recipe = dataclasses.replace(recipe, scale_dtype=case.dtype)
        if not recipe.group:
            return cls(dataclasses.replace(recipe, group=hidden), None, fp8)
        parts = 4 if case.kernel == SPLIT else 1
        return None if hidden % (parts * recipe.group) else cls(recipe, None, fp8)


def run(call: Call, wanted: Wanted, keep: bool) -> list[torch.Tensor]:
    """(values, scales, normed, total)"""
    case = call.case
    modifiers = (call.residual, call.bias, case.scale, call.factor, case.weight_offset, case.normed_dtype)
    quantisation = (keep, wanted.dtype, wanted.scale, *wanted.recipe.arguments, case.kernel)
    return OP(call.input, call.weight, call.group.group_name, EPS, *modifiers, *quantisation)


@dataclasses.dataclass
class Trial:
    """A call and how it is quantised; ``keep``: the norm is wanted, too."""

    call: Call
    name: str
    keep: bool = False
    fp8: torch.dtype = E4M3

    @property
    def wanted(self) -> Wanted:
        found = Wanted.of(self.name, self.call.case, self.fp8)
        assert found is not None
        return found

    def both(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """By one kernel: without the quantisation, and with it."""
        return self.call.run(), run(self.call, self.wanted, self.keep)

    def judge(self) -> str:
        """What is wrong with it: against the operation without quantisation by the same kernel, and on other ranks."""
        told = []
        (normed, total), (values, scales, kept, summed) = self.both()
        if differ(summed, total).item() or (self.keep and differ(kept, normed).item()):
            told.append("normed or total are not those without quantisation")
        expected = quantized(normed, self.fp8, self.wanted.scale, self.wanted.recipe)
        told += [*_different(values, expected[0], "values"), *_different(scales, expected[1], "scales")]
        if not all(map(same_on_all_ranks, (values, scales, summed))):
            told.append("other bits on another rank")
        kind = f"{self.call.case} {self.name} {self.fp8}{' kept' if self.keep else ''}"
        return f"{kind}: {'; '.join(told)}" if told else ""


def _trials(cases: Iterable[Case], names: Iterable[str], **options: Any) -> list[Trial]:
    """Of all that the kernels can do."""
    names = tuple(names)
    return [Trial(Call(case), name, **options) for case in cases for name in names if Wanted.of(name, case) is not None]


def _all_right(told: list[str], trials: Sequence[Trial]) -> None:
    """Judge them; compile what they need first, a part of it on each rank."""
    compile_ahead([each.both for each in trials if each.call.case.kernel is not None])
    for each in trials:
        right(told, each.judge())


def _different(found: torch.Tensor, expected: torch.Tensor, what: str) -> list[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype or not found.is_contiguous():
        return [f"{what} are {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"]
    nans = expected.float().isnan()
    wrong = (bits(found) != bits(expected)).view(*nans.shape, found.itemsize).any(-1) & ~nans
    wrong |= found.float().isnan() != nans
    return [f"{int(wrong.sum())} of {wrong.numel()} {what} differ"] if wrong.any() else []


# -- checks --------------------------------------------------------------------------------------------------------------


def _recipes(told: list[str]) -> None:
    trials = _trials((Case((t, 4096), kernel=kernel) for kernel in (SPLIT, RING) for t in (1, 5)), RECIPES, keep=True)
    trials += _trials([Case((5, 4096), kernel=NCCL)], ("row", "group"), keep=True)
    trials += _trials([Case((5, 4096), kernel=RING)], ("row", "static"), fp8=E5M2)
    trials += _trials([Case((5, 4096), FP16, SPLIT)], ["row"]) + _trials([Case((5, 4096), FP16, RING)], ["group"])
    _all_right(told, trials)


def _sizes(told: list[str]) -> None:
    """Odd ones too: rows that fill no vectors, blocks or parts."""
    trials = []
    for kernel, rows in ((SPLIT, (3, 32)), (RING, (3, 300))):
        trials += _trials((Case((t, d), kernel=kernel) for d in (1, 7, 100, 2880, 4100, 16384) for t in rows), ["row"])
        trials += _trials((Case((t, d), kernel=kernel) for d in (128, 2944, 7168, 16384) for t in rows), ["group"])
        trials += _trials((Case((t, 4100), kernel=kernel) for t in rows), ["static"])
    _all_right(told, trials)


def _options(told: list[str]) -> None:
    options: tuple[dict, ...] = (
        {"residual": False, "bias": True, "scale": 1.5},
        {"weight": False, "scale_tensor": True},
        {"weight_dtype": FP32, "weight_offset": 1.0, "normed_dtype": BF16},
    )
    for kernel, name in ((SPLIT, "row"), (RING, "group")):
        _all_right(told, _trials((Case((5, 512), kernel=kernel, **given) for given in options), [name]))


def _chosen(told: list[str]) -> None:
    """Without a kernel's name: by size, up and down again; also what only the reference can do."""
    _all_right(told, _trials((Case((t, 4096)) for t in (1, 16, 33, 264, 33, 1)), ("row", "group", "static"), keep=True))
    for case in (Case((0, 256)), Case((3, 256), FP32), Case((2, 20480)), Case((2, 3, 256))):
        call = Call(case)
        values, scales, total = ops.all_reduce_rms_norm_quantize_fp8(
            call.input, call.weight, group=call.group, eps=EPS, residual=call.residual, dtype=E5M2
        )
        normed = call.run()[0] if case.shape[-1] < 20480 else call.plain()[0]  # the reference does rows as long as these
        expected = quantized(normed, E5M2, None, Recipe(group=case.shape[-1]))
        right(
            told, *_different(values, expected[0], f"{case}: values"), *_different(scales, expected[1], f"{case}: scales")
        )
        if total.shape != case.shape:
            told.append(f"{case}: total is {list(total.shape)}")
    for kernel, given, words in (
        (SPLIT, {"recipe": Recipe(group=128)}, "in 4 parts"),
        (RING, {"recipe": Recipe()}, "whole tensor"),
        ("flashinfer", {}, "the kernels are"),
    ):
        call = Call(Case((2, 384), kernel=kernel))
        arguments = {"group": call.group, "eps": EPS, "kernel": kernel, **given}
        why = error_of(
            lambda call, arguments: ops.all_reduce_rms_norm_quantize_fp8(call.input, call.weight, **arguments),
            call,
            arguments,
        )
        if not why.startswith("ConfigError") or words not in why:
            told.append(f"{kernel}: {why or 'no error'}")


def _special_values(told: list[str]) -> None:
    """NaN, infinities, zeros and tiny values stay in their row or group."""
    for kernel in (SPLIT, RING):
        for value in (float("nan"), float("inf"), 0.0, 1e-30):
            trials = _trials([Case((7, 4096), kernel=kernel)], ("row", "group", "static"), keep=True)
            for each in trials:
                before = run(each.call, each.wanted, True)
                for part in (*each.call.parts, each.call.residual):
                    part[3, 100 if value != value or value > 1 else slice(None)] = value
                right(told, each.judge())
                others = [0, 1, 2, 4, 5, 6]
                after = run(each.call, each.wanted, True)
                if any(differ(a[others], b[others]).item() for a, b in zip(after, before, strict=True) if a.numel()):
                    told.append(f"{each.call.case} {each.name}: {value} in row 3 changes another row")


def _cuda_graphs(told: list[str]) -> None:
    for kernel, name in itertools.product((SPLIT, RING), ("row", "group", "static")):
        (each,) = _trials([Case((5, 4096), kernel=kernel)], [name], keep=True)
        call, wanted = each.call, each.wanted
        run(call, wanted, True)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [run(call, wanted, True) for _ in range(3)]
        for seed in range(3):
            fresh = Call(call.case, seed=10 + seed)
            for tensor, new in zip(call.tensors(), fresh.tensors(), strict=True):
                tensor.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            expected = run(fresh, wanted, True)
            if any(differ(a, b).item() for results in captured for a, b in zip(results, expected, strict=True)):
                told.append(f"{call.case} {name}: a replay gives other bits")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "recipes": _recipes,
    "sizes": _sizes,
    "options": _options,
    "chosen": _chosen,
    "special values": _special_values,
    "CUDA graphs": _cuda_graphs,
}


def _numbers(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with noted(found, "arena"):
        made = dispatch.of(dist.group.WORLD.group_name)
        assert not isinstance(made, str), made
    for name in CHECKS if not found["arena"] else ():
        start = time.monotonic()
        with noted(found, name) as told:
            CHECKS[name](told)
        if rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s, {len(found[name])} wrong", flush=True)
    return found


def _verdict(found: dict[str, list[str]], names: Iterable[str]) -> str:
    return "\n".join(f"{name}: {each}" for name in names for each in found.get(name, ["was not reached"])[:20])


@pytest.fixture(scope="module")
def numbers():
    return spawn(_numbers, 2, backend="cuda", timeout_s=60, grace_s=220)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["arena", *CHECKS])
def test_numbers(numbers, name):
    for found in numbers:
        assert not _verdict(found, [name]), _verdict(found, [name])


def _everything(rank: int) -> str:
    found = _numbers(rank)
    told = _verdict(found, found)
    assert not told, told
    return "all right"


if __name__ == "__main__":
    under_torchrun(_everything)
