"""Our CUDA kernels compile for Hopper, without a GPU; what is kept on disk is found again, and nothing else is."""

from __future__ import annotations

import itertools

import pytest
import torch

from tpfuse.kernels.cuda import build
from tpfuse.kernels.cuda import matmul_reduce_scatter as scatter

pytest.importorskip("cuda.core")
OPTIONS = scatter.options_for(2, torch.bfloat16, 128, 6)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_matmul_reduce_scatter_compiles(world):
    for dtype, (columns, stages) in itertools.product((torch.bfloat16, torch.float16), ((128, 6), (256, 3))):
        options = scatter.options_for(world, dtype, columns, stages)
        _, code = build.compiled(scatter._FILES, options, "sm_90a")
        assert code[:4] == b"\x7fELF" and b"matmul_reduce_scatter" in code


def test_kept_and_found_again(cache, monkeypatch):
    path, code = build.compiled(scatter._FILES, OPTIONS, "sm_90a")
    assert [*cache.iterdir()] == [path] and path.read_bytes() == code
    monkeypatch.setattr(build, "_compiler", lambda: (None, None, build_version))
    assert build.compiled(scatter._FILES, OPTIONS, "sm_90a") == (path, code)


def test_other_options_are_another_file(cache):
    for arch, stages in (("sm_90a", 6), ("sm_90a", 5), ("sm_100a", 6)):
        options = scatter.options_for(2, torch.bfloat16, 128, stages)
        try:
            build.compiled(scatter._FILES, options, arch)
        except build.BuildError:
            assert arch == "sm_100a"  # has no wgmma
    assert len([*cache.iterdir()]) == 2


def test_a_folder_that_cannot_be_written(cache):
    cache.parent.joinpath("kernels").write_text("a file")
    _, code = build.compiled(scatter._FILES, OPTIONS, "sm_90a")
    assert code[:4] == b"\x7fELF"


def test_what_does_not_compile_is_told():
    with pytest.raises(build.BuildError, match="NVRTC: matmul_reduce_scatter"):
        build.compiled(scatter._FILES, (("WORLD", 2),), "sm_90a")


def test_a_structure_as_the_kernel_has_it():
    """Tensor maps first, on 64-byte boundaries; then addresses; then numbers."""
    for world in (2, 8):
        kind = scatter._parameters(world)
        assert kind.sent.offset == 4 * 128 and kind.peer_flags.offset == (4 + world - 1) * 128
        assert kind.flags.offset == kind.peer_flags.offset + 16 * (world - 1)
        assert kind.rows.offset == kind.flags.offset + 5 * 8 and kind.tag.offset == kind.rows.offset + 10 * 4


def test_what_the_kernel_cannot():
    assert scatter.cannot(64, 512, 512, torch.float32) == "dtype torch.float32"
    assert "multiples of 8" in scatter.cannot(64, 511, 512, torch.bfloat16)
    assert scatter.cannot(0, 512, 512, torch.bfloat16) and not scatter.cannot(1, 8, 8, torch.float16)


build_version = build._compiler()[2]
