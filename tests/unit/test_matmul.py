"""GEMMs with collectives: what they refuse, and the shapes that a compiler sees."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tpfuse import ops
from tpfuse.errors import ConfigError
from tpfuse.ops.matmul import FP8, rows_of
from tpfuse.testing import fake_world

X, W = torch.ones(4, 8), torch.ones(8, 6)
E4M3 = FP8[0]
ROW_SCALES = {"input_scale": torch.ones(4, 1), "weight_scale": torch.ones(1, 6)}


def scaled(**fields):
    return {"out_dtype": torch.bfloat16, "input_scale": torch.ones(()), "weight_scale": torch.ones(()), **fields}


@pytest.mark.parametrize(
    ("input", "weight", "fields", "told"),
    [
        (torch.ones(8), W, {}, "input must be"),
        (X, torch.ones(7, 6), {}, r"weight must be \[8, N\], got torch.float32 \[7, 6\]"),
        (X, torch.ones(2, 8, 6), {}, r"weight must be \[K, N\]"),
        (X.int(), W.int(), {}, "input must be bf16, fp16, fp32 or FP8"),
        (X, W.bfloat16(), {}, "weight must go with torch.float32"),
        (X, W, {"bias": torch.ones(8)}, r"bias must be torch.float32 \[6\]"),
        (X, W, {"bias": torch.ones(6).half()}, r"bias must be torch.float32 \[6\], got torch.float16"),
        (X, W, {"out_dtype": torch.bfloat16}, "out_dtype must be torch.float32 or None"),
        (X, W, ROW_SCALES, "scales are for FP8"),
        (X.to(E4M3), W.to(E4M3), {}, "FP8 needs fp32 scales"),
        (X.to(E4M3), W.to(E4M3), scaled(out_dtype=None), "FP8 needs an out_dtype"),
        (X.to(E4M3), W.to(E4M3), scaled(input_scale=torch.ones(4, 1)), "scales must be one number each, or"),
        (X.to(E4M3), W.to(E4M3), scaled(input_scale=torch.ones(3, 1), weight_scale=torch.ones(1, 6)), "scales must be"),
        (X.to(E4M3), W, scaled(), "weight must go with torch.float8_e4m3fn"),
        (X.to(E4M3), W.to(E4M3), scaled(weight_scale=torch.ones((), requires_grad=True)), "has no backward for FP8"),
        (X, W.to("meta"), {}, "all tensors must be on one device"),
    ],
)
def test_what_is_refused(input, weight, fields, told):
    for operation in (ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        with pytest.raises(ValueError, match=f"^{operation.__name__}.*{told}"):
            operation(input, weight, group="0", **fields)
    plural = {"bias": "biases", "weight_scale": "weight_scales"}
    listed = {plural[k]: [v] for k, v in fields.items() if k in plural}
    with pytest.raises(ValueError, match=f"^all_gather_matmul.*{told}"):
        ops.all_gather_matmul(input, weight, group="0", **listed, **{k: v for k, v in fields.items() if k not in plural})


def test_what_else_is_refused():
    with fake_world(2) as group:
        for dim in (-1, 1):
            with pytest.raises(ValueError, match="dim must be 0 to 0"):
                ops.matmul_reduce_scatter(X, W, group=group, dim=dim)
            with pytest.raises(ValueError, match="dim must be 0 to 0"):
                ops.all_gather_matmul(X, W, group=group, dim=dim)
        with pytest.raises(ValueError, match=r"wire_dtype must be torch\.float32 or the result's"):
            ops.matmul_reduce_scatter(X, W, group=group, wire_dtype=torch.float16)
        for size in (9, 6, -1):
            with pytest.raises(ValueError, match="size must be 7 to 8"):
                ops.all_gather_matmul(X, W, group=group, size=size)
        with pytest.raises(ValueError, match="1 weights with 2 biases"):
            ops.all_gather_matmul(X, W, group=group, biases=[None, None])
        with pytest.raises(ValueError, match="0 weights"):
            ops.all_gather_matmul(X, [], group=group)


def test_unknown_kernels_are_refused_everywhere():
    with fake_world(2) as group:
        for call in (
            lambda: ops.matmul_reduce_scatter(X, W, group=group, kernel="magic"),
            lambda: ops.all_gather_matmul(X, W, group=group, kernel="magic"),
            lambda: ops.matmul_all_reduce(X, W, group=group, kernel="magic"),
            lambda: ops.all_reduce(X, group=group, kernel="magic"),
            lambda: ops.all_reduce_rms_norm(X, None, group=group, eps=1e-6, kernel="magic"),
        ):
            with pytest.raises(ConfigError, match=r"^kernel 'magic' cannot run "):
                call()


def test_known_kernels_are_for_gpus():
    """CPU ranks run the reference, whichever is named."""
    with fake_world(2) as group:
        for kernel in ("nccl", "torch_symm_mem", "tpfuse"):
            assert ops.matmul_reduce_scatter(X, W, group=group, kernel=kernel).shape == (2, 6)
            assert ops.all_gather_matmul(X, W, group=group, kernel=kernel)[0].shape == (8, 6)
        for kernel in ("nccl", "tpfuse_all_reduce"):
            assert torch.equal(ops.matmul_all_reduce(X, W, group=group, kernel=kernel), X @ W)
        with pytest.raises(ConfigError, match="cannot run matmul_all_reduce: the kernels are nccl, tpfuse_all_reduce"):
            ops.matmul_all_reduce(X, W, group=group, kernel="torch_symm_mem")


@pytest.mark.parametrize("group", [None, -100, "no such group"])
def test_what_is_no_group(group):
    for call in (
        lambda: ops.matmul_reduce_scatter(X, W, group=group),
        lambda: ops.all_gather_matmul(X, W, group=group),
        lambda: ops.matmul_all_reduce(X, W, group=group),
        lambda: ops.all_reduce(X, group=group),
        lambda: ops.all_reduce_rms_norm(X, None, group=group, eps=1e-6),
    ):
        with pytest.raises(ValueError, match=r"group must be a ProcessGroup|no process group named 'no such group'"):
            call()


def test_rows_of_a_rank():
    with fake_world(4) as group:
        assert [rows_of(rows, group) for rows in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
        assert rows_of(5, group, share=3) == 3


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shapes_of_fakes_are_those_of_results(world):
    shapes = [((0, 8), 0), ((1, 8), 0), ((7, 8), 0), ((2, 5, 8), 0), ((2, 5, 8), 1), ((3, 0, 8), 1)]
    with fake_world(world) as group:
        for shape, dim in shapes:
            calls = [
                lambda x, w, dim=dim: (ops.matmul_reduce_scatter(x, w, group=group, dim=dim),),
                lambda x, w: (ops.matmul_all_reduce(x, w, group=group),),
                lambda x, w, dim=dim: ops.all_gather_matmul(x, [w, w], group=group, dim=dim, gathered=True),
            ]
            for call in calls:
                real = call(torch.ones(shape), torch.ones(8, 6))
                with FakeTensorMode():
                    fake = call(torch.ones(shape), torch.ones(8, 6))
                assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]
            (scattered,) = calls[0](torch.ones(shape), torch.ones(8, 6))
            assert scattered.shape[dim] == -(-shape[dim] // world) and scattered.shape[-1] == 6


def test_compiled_for_any_number_of_rows():
    with fake_world(2) as group:

        def function(x, w):
            shard = ops.matmul_reduce_scatter(x, w, group=group)
            return ops.all_gather_matmul(shard, [w.t()], group=group, size=x.shape[0])[0]

        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.no_grad():
            for rows in (4, 6, 9, 2):
                assert compiled(torch.ones(rows, 8), torch.ones(8, 6)).shape == (rows, 8)
