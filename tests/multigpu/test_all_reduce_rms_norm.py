"""All-reduce + RMSNorm by every kernel: numbers against fp64, bits, shapes, layouts and special values.

Also runs as `torchrun --nproc-per-node 2 tests/multigpu/<this file>`. One spawn makes many checks: starting ranks is what
costs. A check notes what it finds wrong and goes on, so that no rank is left alone in a collective.

T  rows (tokens)     D  hidden size
"""

from __future__ import annotations

import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable

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
    compile_ahead,
    differ,
    error_of,
    excess,
    here,
    judge,
    noted,
    right,
    same_on_all_ranks,
)
from tpfuse import ops
from tpfuse.comm.arena import SENTINEL, SLOT_BYTES
from tpfuse.kernels import dispatch
from tpfuse.tables import Choice
from tpfuse.testing import spawn, under_torchrun

SPLIT, RING, NCCL = "tpfuse_split", "tpfuse_ring", "nccl"
MOST_SPLIT_ROWS = 32
HIDDEN = (1, 7, 8, 100, 2880, 2944, 4098, 4100, 5120, 6144, 7168, 8192, 12288, 16384)
ROWS = (1, 2, 3, 31, 32, 33, 264, 265, 1000, 4096)
#: One thing at a time, and for the other dtypes several at once: each is a kernel to compile.
OPTIONS: tuple[dict, ...] = (
    {"residual": False},
    {"bias": True},
    {"scale": 1.5},
    {"scale_tensor": True},
    {"weight": False},
    {"weight_offset": 1.0},
    {"weight_dtype": FP32},
    {"weight_dtype": FP32, "weight_offset": 1.0},
    {"weight_dtype": FP16},
    {"out_dtype": FP32},
    {"normed_dtype": BF16},
    {"normed_dtype": BF16, "out_dtype": FP32},
    {"normed_dtype": BF16, "weight_dtype": FP32, "out_dtype": FP32},
    {"normed_dtype": FP32, "out_dtype": FP16},
)
TOGETHER: tuple[dict, ...] = (
    {"residual": False, "bias": True, "scale": -0.5, "weight_dtype": FP32, "out_dtype": FP32},
    {"bias": True, "scale_tensor": True, "weight_offset": 1.0, "normed_dtype": True},
    {"weight_dtype": BF16, "out_dtype": BF16},
    {"weight": False, "normed_dtype": True, "residual": False},
)


def _fits(case: Case) -> bool:
    """Whether the kernel that is asked for by name can do this."""
    rows, row_bytes = torch.Size(case.shape[:-1]).numel(), case.shape[-1] * case.dtype.itemsize
    if case.kernel == SPLIT and rows > MOST_SPLIT_ROWS:
        return False
    return case.kernel not in (SPLIT, RING) or row_bytes <= SLOT_BYTES


# -- numbers -------------------------------------------------------------------------------------------------------------


def _all_right(told: list[str], cases: Iterable[Case]) -> None:
    """Judge the cases; compile what they need first, a part of it on each rank."""
    calls = [Call(case, seed=seed) for seed, case in enumerate(cases) if _fits(case)]
    compile_ahead([call.run for call in calls if call.case.kernel is not None])
    for call in calls:
        right(told, judge(call))


def _options(told: list[str]) -> None:
    """Every option, by every kernel."""
    shape = (5, 512)
    cases = [Case(shape, kernel=kernel, **options) for kernel in (SPLIT, RING, NCCL, None) for options in OPTIONS]
    for dtype in (FP16, FP32):
        for options in TOGETHER:
            given = {**options, "normed_dtype": dtype if options.get("normed_dtype") else None}
            cases += [Case(shape, dtype, kernel, **given) for kernel in (SPLIT, RING, None)]
    _all_right(told, cases)


def _hidden_sizes(told: list[str]) -> None:
    for dtype, kernels in ((BF16, (SPLIT, RING, NCCL, None)), (FP16, (SPLIT, RING)), (FP32, (SPLIT, RING, None))):
        _all_right(told, [Case((t, d), dtype, kernel) for kernel in kernels for d in HIDDEN for t in (1, 5, 300)])


def _row_counts(told: list[str]) -> None:
    """Up and down again: slots and epochs go on from one size to the next."""
    for kernel in (SPLIT, RING, NCCL, None):
        _all_right(told, [Case((t, 4096), kernel=kernel) for t in (*ROWS, *reversed(ROWS))])


def _large_messages(told: list[str]) -> None:
    """Rows past what the arena holds at once, in an order that grows and one that shrinks."""
    counts = (1, 47, 48, 49, 145, 146, 147, 512, 2047, 2048, 2049, 8192, 16384)
    for kernel in (RING, None):
        for rows in (*counts, *reversed(counts)):
            right(told, judge(Call(Case((rows, 7168), kernel=kernel), seed=rows)))
        right(told, *(judge(Call(Case((rows, 8192), kernel=kernel), seed=rows)) for rows in (8192, 16, 8192)))


def _past_32_bits(told: list[str]) -> None:
    """More than 2**31 elements: offsets that are computed in 32 bits read other rows."""
    for kernel in (RING, None):
        call = Call(Case((262145, 8192), kernel=kernel))
        right(told, judge(call, plain=False))
        del call
        torch.cuda.empty_cache()


def _no_rows(told: list[str]) -> None:
    for kernel in (SPLIT, RING, NCCL, None):
        for shape in ((4, 96), (0, 96), (3, 96), (2, 0, 96), (1, 96)):
            call = Call(Case(shape, kernel=kernel, out_dtype=FP32))
            if call.input.numel():
                right(told, judge(call))
                continue
            normed, total = call.run()
            if normed.shape != shape or total.shape != shape or (normed.dtype, total.dtype) != (FP32, BF16):
                told.append(f"{call.case}: {normed.dtype} {list(normed.shape)}, {total.dtype} {list(total.shape)}")


def _long_rows(told: list[str]) -> None:
    """Rows longer than a slot: something else does them; a kernel that was asked for by name says why it cannot."""
    long = [((t, d), dtype) for d, dtype in ((20480, BF16), (12288, FP32), (20480, FP32)) for t in (1, 5, 40)]
    for shape, dtype in long:
        right(told, judge(Call(Case(shape, dtype))))
        if shape[-1] * dtype.itemsize <= 2 * SLOT_BYTES:
            right(told, judge(Call(Case(shape, dtype, NCCL))))
        why = error_of(Call(Case(shape, dtype, RING)).run)
        if not why.startswith("ConfigError") or "longer than a slot" not in why:
            told.append(f"{shape} {dtype} by {RING}: {why or 'no error'}")
    for kernel, rows, words in ((SPLIT, MOST_SPLIT_ROWS + 1, "more than 32 rows"), ("tpfuse_rign", 1, "the kernels are")):
        why = error_of(Call(Case((rows, 96), kernel=kernel)).run)
        if not why.startswith("ConfigError") or words not in why:
            told.append(f"{kernel}: {why or 'no error'}")
    for options in ({"normed_dtype": FP16}, {"weight_dtype": torch.float64}):  # no kernel of ours does these
        right(told, judge(Call(Case((3, 96), **options))))


def _exact_weights(told: list[str]) -> None:
    """1 + w added in fp32: bf16 would make 1.0 of 1 + 2**-8, and 16.75 of 16.8125."""
    for kernel in (SPLIT, RING, NCCL):
        for value in (2**-8, 15.8125):
            for dtype in (BF16, FP32):
                call = Call(Case((16, 512), kernel=kernel, residual=False, weight_dtype=dtype, weight_offset=1.0))
                call.weight.fill_(value)
                for other in call.parts[1:]:
                    other.zero_()
                normed, total = call.run()
                exact = call.exact(torch.arange(16, device=here()))[0].to(BF16)
                share = (normed == exact).double().mean().item()
                if share < 0.95 or not torch.equal(total, call.parts[0]):
                    told.append(f"{call.case} w={value}: {share:.1%} of the bits of 1 + w in fp32")
    for eps, expected in ((1e-5, 0.30151), (1e-6, 0.70711), (1e-12, 1.0)):
        x = torch.full((2, 8), 1e-3 / dist.get_world_size(), device=here())
        value = ops.all_reduce_rms_norm(x, None, group=dist.group.WORLD, eps=eps)[0].flatten()[0].item()
        if abs(value - expected) > 1e-4:
            told.append(f"eps={eps}: {value} for {expected}")


def _layouts(told: list[str]) -> None:
    """Strides and addresses of every kind give the bits of plain contiguous tensors."""
    for kernel in (SPLIT, RING, NCCL):
        for name, change in _CHANGES.items():
            call = Call(Case((2, 3, 4096) if "3-D" in name else (5, 4096), kernel=kernel, bias=True))
            given = {which: change(getattr(call, which)) for which in ("input", "residual")}
            if name == "one element on":
                given.update(weight=change(call.weight), bias=change(call.bias))
            expected = call.run(**{k: t.clone(memory_format=torch.contiguous_format) for k, t in given.items()})
            got = call.run(**given)
            right(told, *(f"{kernel}: {name}" for g, e in zip(got, expected, strict=True) if differ(g, e).item()))
            if not all(g.is_contiguous() for g in got):
                told.append(f"{kernel}: {name}: strides {[g.stride() for g in got]}")


def _one_element_on(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return flat.copy_(tensor.reshape(-1)).view(tensor.shape)


_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element on": _one_element_on,
    "transposed": lambda t: t.t().contiguous().t(),
    "column slice": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every other row": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "3-D": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "3-D slice": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
}


def _special_values(told: list[str]) -> None:
    """Negative zeros are what marks an empty slot; NaN and Inf stay in their row."""
    for kernel in (SPLIT, RING, NCCL):
        for dtype in (BF16, FP16, FP32):
            for residual in (True, False):
                call = Call(Case((5, 4096), dtype, kernel, residual))
                for part in call.parts:
                    part.fill_(-0.0)
                right(told, judge(call))
                if residual and differ(call.run()[1], call.residual).item():
                    told.append(f"{call.case}: the sum with -0.0 everywhere is not the residual")
                for index, part in enumerate(call.parts):  # -0.0 beside numbers, at other places on each rank
                    part.normal_(generator=torch.Generator(here()).manual_seed(index))
                    part[:, index::2] = -0.0
                right(told, judge(call))
            if dtype == FP32:  # the marker itself is a number, if the smallest of them
                call = Call(Case((5, 4096), dtype, kernel))
                for part in call.parts:
                    part.view(torch.int32).fill_(SENTINEL)
                right(told, judge(call))
            _poisoned_row(told, Call(Case((7, 4096), dtype, kernel)))


def _poisoned_row(told: list[str], call: Call) -> None:
    clean = call.run()
    others = [0, 1, 2, 4, 5, 6]
    for value in (float("nan"), float("inf"), float("-inf")):
        call.parts[1][3, 100] = value
        got, plain = call.run(), call.plain()
        for g, c, p in zip(got, clean, plain, strict=True):
            if differ(g[others], c[others]).item():
                told.append(f"{call.case}: {value} in row 3 changes another row")
            if not torch.equal(g[3].isnan(), p[3].isnan()) or not torch.equal(g[3].isinf(), p[3].isinf()):
                told.append(f"{call.case}: row 3 with {value} is not what plain maths gives")
        right(told, *(f"{call.case}: ranks differ with {value}" for g in got if not same_on_all_ranks(g)))


def _arrangements(told: list[str]) -> None:
    """Warps, blocks and registers that a table may ask for."""
    from tpfuse.kernels.triton import own

    arena = dispatch.of(dist.group.WORLD.group_name).arena
    ring = (
        {"warps": 4, "blocks": 132},
        {"warps": 16, "blocks": 20, "registers": 64},
        {"warps": 32},
        {"warps": 8, "blocks": 7},
    )
    layouts = {"ring": ring, "split": ({"warps": 4}, {"warps": 16, "registers": 64})}
    for name, layout in ((name, layout) for name, listed in layouts.items() for layout in listed):
        call, choice = Call(Case((300 if name == "ring" else 13, 8192))), Choice(f"tpfuse_{name}", **layout)
        arguments = (name, arena, call.input, call.weight, EPS, call.residual)
        got, again = (own.all_reduce_rms_norm(*arguments, choice=choice) for _ in range(2))
        for g, a, p, e in zip(got, again, call.plain(), call.exact(slice(None)), strict=True):
            if not excess(g, p, e) <= 1:
                told.append(f"{choice}: {excess(g, p, e):.3g} of the allowed error")
            if differ(g, a).item() or not same_on_all_ranks(g):
                told.append(f"{choice}: bits differ")


def _plain_all_reduce(told: list[str]) -> None:
    shapes = ((1,), (5,), (4104,), (3, 1367), (0, 8), (100001,), (3_000_000,), (33_000_000,))
    for kernel, dtype, shape in itertools.product((RING, NCCL, None), (BF16, FP16, FP32), shapes):
        call = Call(Case(shape, dtype, kernel, residual=False, weight=False))
        got, again = (ops.all_reduce(call.input, group=call.group, kernel=kernel) for _ in range(2))
        if got.shape != shape or got.dtype != dtype or got.data_ptr() == call.input.data_ptr() != 0:
            told.append(f"{call.case}: {got.dtype} {list(got.shape)}, or an alias of the input")
        if not got.numel():
            continue
        ratio = excess(got, None, sum(part.double() for part in call.parts))
        if kernel == RING and not ratio <= 1:  # NCCL may round more than once
            told.append(f"{call.case}: {ratio:.3g} of the allowed error")
        if differ(got, again).item() or not same_on_all_ranks(got):
            told.append(f"{call.case}: bits differ")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "options": _options,
    "hidden sizes": _hidden_sizes,
    "row counts": _row_counts,
    "large messages": _large_messages,
    "past 32 bits": _past_32_bits,
    "no rows": _no_rows,
    "long rows": _long_rows,
    "exact weights": _exact_weights,
    "layouts": _layouts,
    "special values": _special_values,
    "arrangements": _arrangements,
    "plain all-reduce": _plain_all_reduce,
}


def _numbers(rank: int, names: tuple[str, ...] = tuple(CHECKS)) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with noted(found, "arena"):
        made = dispatch.of(dist.group.WORLD.group_name)
        assert not isinstance(made, str), made
    for name in names if not found["arena"] else ():
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_more_than_two_ranks():
    names = ("hidden sizes", "row counts", "special values", "plain all-reduce")
    for found in spawn(_numbers, torch.cuda.device_count(), names, backend="cuda", timeout_s=60, grace_s=220):
        assert not _verdict(found, ["arena", *names]), _verdict(found, ["arena", *names])


def _everything(rank: int) -> str:
    found = _numbers(rank)
    told = _verdict(found, found)
    assert not told, told
    return "all right"


if __name__ == "__main__":
    under_torchrun(_everything)
