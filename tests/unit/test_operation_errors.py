"""Bad arguments of the operations: what is replaced in a good call, and what the error must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.unit.refusals import check_told, destroyed
from tpfuse import ops
from tpfuse.errors import ConfigError, GroupError
from tpfuse.testing import fake_world

X, W, MATRIX = torch.ones(4, 8), torch.ones(8), torch.ones(8, 6)
FP8 = {"input": X.to(torch.float8_e4m3fn), "weight": MATRIX.to(torch.float8_e4m3fn)}
ONE, BF16 = torch.tensor(1.0), torch.bfloat16

#: How each operation is called when all is well, by arguments that a case replaces.
GOOD: dict[str, tuple[Callable, dict[str, Any]]] = {
    "all_reduce": (ops.all_reduce, {"input": X}),
    "all_reduce_rms_norm": (ops.all_reduce_rms_norm, {"input": X, "weight": W, "eps": 1e-6}),
    "matmul_reduce_scatter": (ops.matmul_reduce_scatter, {"input": X, "weight": MATRIX}),
    "matmul_all_reduce": (ops.matmul_all_reduce, {"input": X, "weight": MATRIX}),
    "all_gather_matmul": (ops.all_gather_matmul, {"input": X, "weights": MATRIX}),
}
ROW_PARALLEL = ("matmul_reduce_scatter", "matmul_all_reduce")


def _distributed(tensor):
    return DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), [Replicate()])


#: Of any operation's arguments: id -> (what is replaced, the error, what it says besides the operation's name). A value may
#: be a function that makes it.
ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "input is a list": ({"input": [1.0]}, ValueError, ("input must be a tensor", "list [1.0]")),
    "input is None": ({"input": None}, ValueError, ("input must be a tensor", "got None")),
    "input is int32": ({"input": X.int()}, ValueError, ("input must be bf16, fp16", "torch.int32 [4, 8]")),
    "input is fp64": ({"input": X.double()}, ValueError, ("input must be bf16, fp16", "torch.float64")),
    "input is complex": ({"input": X.to(torch.complex64)}, ValueError, ("input must be bf16", "torch.complex64")),
    "input is sparse": ({"input": X.to_sparse()}, ValueError, ("input must be strided", "torch.sparse_coo")),
    "input is a DTensor": ({"input": lambda: _distributed(X)}, ValueError, ("got a DTensor", "input.to_local()")),
    "group is None": ({"group": None}, GroupError, ("group must be a ProcessGroup or the name of one", "None")),
    "group is a number": ({"group": 3}, GroupError, ("group must be a ProcessGroup or the name of one", "3")),
    "group is unknown": ({"group": "nowhere"}, GroupError, ("no process group named 'nowhere'", "never made")),
    "group is unknown, no rows": ({"group": "nowhere", "input": X[:0]}, GroupError, ("no process group named 'nowhere'",)),
    "group is destroyed": ({"group": destroyed}, GroupError, ("no process group named", "it was destroyed")),
    "group without this rank": ({"group": lambda: dist.new_group([1])}, GroupError, ("this rank is not in the group",)),
    "group for CUDA alone": ({"group": lambda: dist.new_group([0, 1], backend="cuda:fake")}, GroupError, (
        "carries tensors on cuda, got one on cpu",)),
    "kernel is unknown": ({"kernel": "nope"}, ConfigError, ("kernel 'nope' cannot run", "the kernels are", "nccl")),
    "kernel is a list": ({"kernel": ["nccl"]}, ConfigError, ("kernel ['nccl'] cannot run",)),
}  # fmt: skip

#: Of one operation.
OF_ONE: dict[str, dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]]] = {
    "all_reduce_rms_norm": {
        "input has no dimension": ({"input": ONE}, ValueError, ("input must be [..., D]", "[]")),
        "weight of another size": ({"weight": torch.ones(7)}, ValueError, ("weight must be [8]", "[7]")),
        "weight of integers": ({"weight": W.int()}, ValueError, ("weight must be floating", "torch.int32")),
        "weight is a number": ({"weight": 1.0}, ValueError, ("weight must be a tensor", "float 1.0")),
        "residual of another shape": ({"residual": torch.ones(5, 8)}, ValueError, ("residual must be", "[4, 8]", "[5, 8]")),
        "residual of another dtype": ({"residual": X.half()}, ValueError, ("torch.float32 [4, 8]", "torch.float16")),
        "residual elsewhere": ({"residual": X.to("meta")}, ValueError, ("residual must be on cpu", "meta")),
        "bias of another size": ({"bias": torch.ones(3)}, ValueError, ("bias must be [8]", "[3]")),
        "bias of another dtype": ({"bias": W.half()}, ValueError, ("bias must be torch.float32", "torch.float16")),
        "scale is a text": ({"scale": "2"}, ValueError, ("scale must be a finite number", "'2'")),
        "scale of two elements": ({"scale": torch.ones(2)}, ValueError, ("one element of torch.float32", "[2]")),
        "scale that learns": ({"scale": torch.ones(1, requires_grad=True)}, ValueError, ("no backward for a scale",)),
        "eps is NaN": ({"eps": float("nan")}, ValueError, ("eps must be a finite number of at least 0", "nan")),
        "eps is negative": ({"eps": -1.0}, ValueError, ("eps must be a finite number of at least 0", "-1.0")),
        "eps is None": ({"eps": None}, ValueError, ("eps must be a finite number", "None")),
        "weight_offset is a text": ({"weight_offset": "1"}, ValueError, ("weight_offset must be a finite number", "'1'")),
        "normed_dtype of integers": ({"normed_dtype": torch.int32}, ValueError, ("normed_dtype must be a floating",)),
        "out_dtype is a text": ({"out_dtype": "bf16"}, ValueError, ("out_dtype must be a floating torch.dtype", "'bf16'")),
    },
    "all_gather_matmul": {
        "no weights": ({"weights": []}, ValueError, ("at least one weight", "got 0 weights")),
        "weights is a number": ({"weights": 3}, ValueError, ("weights must be a tensor or a list", "int 3")),
        "a weight is a number": ({"weights": [3]}, ValueError, ("weight must be a tensor", "int 3")),
        "fewer biases": ({"weights": [MATRIX] * 2, "biases": [None]}, ValueError, ("2 weights with 1 biases",)),
        "biases is a number": ({"biases": 1.0}, ValueError, ("biases must be a tensor or a list", "float 1.0")),
        "size is too large": ({"size": 99}, ValueError, ("size must be 7 to 8", "99")),
        "size is a fraction": ({"size": 8.0}, ValueError, ("size must be a whole number", "8.0")),
        "dim is that of columns": ({"dim": 1}, ValueError, ("dim must be 0 to 0", "got 1")),
        "dim is a text": ({"dim": "0"}, ValueError, ("dim must be a whole number", "'0'")),
    },
    "matmul_reduce_scatter": {
        "dim is negative": ({"dim": -1}, ValueError, ("dim must be 0 to 0", "-1")),
        "dim is None": ({"dim": None}, ValueError, ("dim must be a whole number", "None")),
    },
}

#: Of both row-parallel products.
PRODUCTS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "input has no rows": ({"input": W}, ValueError, ("input must be [..., K] with rows", "[8]")),
    "weight is a vector": ({"weight": W}, ValueError, ("weight must be [K, N]", "[8]")),
    "weight of another K": ({"weight": torch.ones(7, 6)}, ValueError, ("weight must be [8, N]", "[7, 6]")),
    "weight of another dtype": ({"weight": MATRIX.bfloat16()}, ValueError, ("must go with torch.float32", "bfloat16")),
    "weight elsewhere": ({"weight": MATRIX.to("meta")}, ValueError, ("all tensors must be on one device", "cpu, meta")),
    "weight is a DTensor": ({"weight": lambda: _distributed(MATRIX)}, ValueError, ("weight.to_local()",)),
    "bias of another size": ({"bias": torch.ones(5)}, ValueError, ("bias must be torch.float32 [6]", "[5]")),
    "bias is a number": ({"bias": 1.0}, ValueError, ("bias must be a tensor", "float 1.0")),
    "scales without FP8": ({"input_scale": ONE, "weight_scale": ONE}, ValueError, ("scales are for FP8",)),
    "out_dtype without FP8": ({"out_dtype": BF16}, ValueError, ("out_dtype must be torch.float32 or None", "bfloat16")),
    "wire_dtype of integers": ({"wire_dtype": torch.int8}, ValueError, ("wire_dtype must be torch.float32", "int8")),
    "FP8 without scales": (FP8, ValueError, ("FP8 needs fp32 scales", "None")),
    "FP8 with a number": (
        {**FP8, "input_scale": 1.0, "weight_scale": 1.0, "out_dtype": BF16},
        ValueError, ("input_scale must be a tensor", "float 1.0")),
    "FP8 with scales of another shape": (
        {**FP8, "input_scale": torch.ones(3, 1), "weight_scale": torch.ones(1, 6), "out_dtype": BF16},
        ValueError, ("scales must be one number each, or [4, 1] and [1, 6]", "[3, 1]")),
    "FP8 with half scales": (
        {**FP8, "input_scale": ONE.half(), "weight_scale": ONE.half(), "out_dtype": BF16},
        ValueError, ("FP8 needs fp32 scales", "torch.float16")),
    "FP8 without out_dtype": (
        {**FP8, "input_scale": ONE, "weight_scale": ONE},
        ValueError, ("FP8 needs an out_dtype of bf16, fp16 or fp32",)),
    "FP8 that learns": (
        {**FP8, "input_scale": ONE, "weight_scale": ONE.clone().requires_grad_(), "out_dtype": BF16},
        ValueError, ("no backward for FP8", "torch.no_grad()")),
}  # fmt: skip

CALLS = {
    **{f"{op}: {name}": (op, case) for op in GOOD for name, case in ARGUMENTS.items()},
    **{f"{op}: {name}": (op, case) for op, cases in OF_ONE.items() for name, case in cases.items()},
    **{f"{op}: {name}": (op, case) for op in ROW_PARALLEL for name, case in PRODUCTS.items()},
}


@pytest.fixture(scope="module")
def group():
    with fake_world(2) as made:
        yield made


def test_good_calls(group):
    """What the cases below change does work."""
    for call, arguments in GOOD.values():
        call(**arguments, group=group)


@pytest.mark.parametrize("name", CALLS)
def test_operations(group, name):
    op, (changed, error, words) = CALLS[name]
    call, arguments = GOOD[op]
    given = {argument: value() if callable(value) else value for argument, value in changed.items()}
    says_op = (op,) if error is not GroupError else ()
    check_told(lambda: call(**{**arguments, "group": group, **given}), error, (*says_op, *words))
