"""Our CUDA kernels compile for Hopper, without a GPU; what is kept on disk is found again, and nothing else is."""

from __future__ import annotations

import itertools
import pathlib
import re
import types

import pytest
import torch

from tpfuse.errors import BuildError, ConfigError
from tpfuse.kernels.aligned import aligned
from tpfuse.kernels.cuda import all_gather_matmul as gather
from tpfuse.kernels.cuda import build, gemm
from tpfuse.kernels.cuda import matmul_reduce_scatter as scatter
from tpfuse.kernels.cuda.gemm import Tiling

pytest.importorskip("cuda.core")
SMALL, LARGE, PAIR = Tiling(128, 5), Tiling(256, 3, cluster=2), Tiling(256, 3, cluster=2, split=2)
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
OPTIONS = scatter.options(2, 1, BF16, BF16, SMALL, False)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_they_compile(world):
    every = [
        (BF16, SMALL, False),
        (BF16, PAIR, True),
        (FP16, LARGE, False),
        (BF16, LARGE, True),
        (FP8, SMALL, False),
        (FP8, LARGE, False),
    ]
    for dtype, cut, rows in every if world == 2 else [(BF16, LARGE, False)]:
        matrices = 1 if world == 2 else world - 1 if world < 8 else gather.MOST_MATRICES
        kinds = (dtype, BF16 if dtype == FP8 else dtype, cut, rows)
        for files, options in (
            (scatter.FILES, scatter.options(world, matrices, *kinds)),
            (scatter.FILES, scatter.options(world, matrices, *kinds, all_rows=True, fp32_wire=cut is SMALL)),
            (gather.FILES, gather.options(world, matrices, *kinds)),
        ):
            if cut is LARGE and dtype == FP16:
                options = (*options, ("PROFILE", 1))
            _, code = build.compiled(files, options, "sm_90a")
            assert code[:4] == b"\x7fELF" and f".text.{build.name_of(files, options)}".encode() in code


def test_they_fit_into_shared_memory():
    """With the barriers, which are not counted."""
    arena = types.SimpleNamespace(world=2, multiprocessors=132)
    for rows, columns, inner in itertools.product((1, 128, 4096), (8, 4096, 8192), (8, 2048, 14336)):
        for dtype, *kind in itertools.product((BF16, FP8), (False, True), (False, True)):
            cut = scatter.tiling(arena, rows, columns, inner, dtype, *kind)
            assert scatter.room(cut, *kind) <= gemm.MOST_SHARED_BYTES and cut.stages >= 3
        assert gather.room(gather.tiling(arena, rows, [columns, 8], inner, BF16)) <= gemm.MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [(4096, 28672, 256), (256, 8192, 256), (1024, 3072, 192), (256, 5120, 192), (256, 4096, 128), (1, 8, 128)],
)
def test_columns_by_rule_of_thumb(rows, width, columns):
    """The widest tiles, unless they leave many multiprocessors idle: as it was measured on an H200 (two ranks' rows)."""
    assert (
        gemm.fastest_columns(132, 2, rows, [width]) == columns == gemm.fastest_columns(132, 2, rows, [width // 8 * 4] * 2)
    )


def test_few_tiles_are_split_by_rule_of_thumb():
    """Those that are computed at once even so, by twice as many multiprocessors; not where K is short."""
    arena = types.SimpleNamespace(world=2, multiprocessors=132)
    for rows, columns, inner, split in (
        (128, 4096, 2048, 2),
        (1, 4096, 7168, 2),
        (128, 4096, 512, 1),
        (128, 8192, 4096, 1),
    ):
        cut = scatter.tiling(arena, rows, columns, inner, BF16)
        assert cut.split == split == gather.tiling(arena, rows, [columns], inner, BF16).split
        if split > 1:
            assert cut.grid(132, cut.tiles(rows, columns) * 2) == (128, 64) and cut.columns == 128
    assert scatter.tiling(arena, 256, 4096, 7168, BF16).split == 1


def test_parts_of_tiles():
    """A cluster has one tile or two; where it cannot share what there is, there is none."""
    pair, stack = Tiling(128, 4, cluster=2, split=2), Tiling(192, 4, cluster=2)
    assert (pair.unit_rows, stack.unit_rows) == (128, 256) and (pair.stack, stack.stack) == (1, 2)
    assert pair.tiles(129, 300) == 2 * 2 * 3 and stack.tiles(129, 300) == 2 * 2
    assert pair.tile_bytes(2) == 64 * 128 * 2 and pair.exchange_bytes == 64 * 128 * 4 and not stack.exchange_bytes
    assert Tiling(256, 2, cluster=2, split=2).exchange_bytes == 64 * 128 * 4
    assert 2 * pair.clocks(512, BF16) == Tiling(128, 4).clocks(512, BF16)
    assert pair.suiting(True, 2) is pair and stack.suiting(False, 1) is stack
    assert pair.suiting(False, 1) == Tiling(128, 4) and stack.suiting(True, 9) == Tiling(192, 4)


def test_kept_and_found_again(cache, monkeypatch):
    path, code = build.compiled(scatter.FILES, OPTIONS, "sm_90a")
    assert [*cache.iterdir()] == [path] and path.read_bytes() == code
    path.write_bytes(b"not what was compiled")
    assert build.compiled(scatter.FILES, OPTIONS, "sm_90a", anew=True) == (path, code) and path.read_bytes() == code
    monkeypatch.setattr(build, "_compiler", lambda: (None, None, build_version))
    assert build.compiled(scatter.FILES, OPTIONS, "sm_90a") == (path, code)


def test_other_options_are_another_file(cache):
    for arch, stages in (("sm_90a", 4), ("sm_90a", 5), ("sm_100a", 5)):
        options = scatter.options(2, 1, BF16, BF16, Tiling(128, stages), False)
        try:
            build.compiled(scatter.FILES, options, arch)
        except BuildError:
            assert arch == "sm_100a"  # has no wgmma
    assert len([*cache.iterdir()]) == 2


def test_a_folder_that_cannot_be_written(cache):
    cache.parent.joinpath("kernels").write_text("a file")
    _, code = build.compiled(scatter.FILES, OPTIONS, "sm_90a")
    assert code[:4] == b"\x7fELF"


def test_without_a_home_folder(monkeypatch):
    def homeless():
        raise ConfigError("no home")

    monkeypatch.setattr(build.tables, "cache_folder", homeless)
    assert build.compiled(scatter.FILES, OPTIONS, "sm_90a")[1][:4] == b"\x7fELF"


def test_what_does_not_compile_is_told():
    with pytest.raises(BuildError, match="NVRTC: matmul_reduce_scatter"):
        build.compiled(scatter.FILES, (("WORLD", 2),), "sm_90a")


def test_structures_as_the_kernels_have_them():
    """Tensor maps first, on their boundaries; then addresses; then numbers."""
    for world, peers in ((2, 1), (8, 7)):
        for matrices in (1, 3):
            kind, maps = scatter.parameters(world, matrices), 2 * matrices + 4
            assert kind.sent.offset == maps * 128 and kind.peer_flags.offset == (maps + 2 * peers) * 128
            assert kind.flags.offset == kind.peer_flags.offset + 16 * peers
            assert kind.inner.offset == kind.flags.offset + 5 * 8 + 2 * 16
            assert kind.rows.offset == kind.inner.offset + 4 * matrices and kind.tag.offset == kind.rows.offset + 13 * 4
            kind = gather.parameters(world, matrices)
            assert kind.sent.offset == 3 * 128 and kind.peer_counts.offset == (3 + peers + 2 * matrices) * 128
            assert kind.bias.offset == kind.peer_counts.offset + 16 * peers + 4 * 8
            assert kind.a_scale.offset == kind.bias.offset + 8 * matrices
            assert kind.columns.offset == kind.a_scale.offset + 16 * (1 + matrices) + 8 * (1 + peers)
            assert kind.tag.offset == kind.columns.offset + 4 * (matrices + 11)


def test_sizes_as_the_kernels_have_them():
    """What stands in Python and in CUDA."""
    folder, shared = pathlib.Path(build.__file__).parent, ""
    for file in gather.FILES[:-1]:
        shared += (folder / file).read_text()
    for own in (scatter, gather):
        text = shared + (folder / own.FILES[-1]).read_text()
        size = lambda name, text=text: int(re.search(rf"\b{name} = (\d+)", text)[1])  # noqa: E731
        assert (size("BM"), size("BK_BYTES"), size("PIECE_ROWS")) == (gemm.TILE_ROWS, gemm.STEP_BYTES, own._PIECE_ROWS)
        assert "NARROW = BN == 256 ? 128 : BN," in text and [Tiling(n).narrow for n in gemm.COLUMNS] == [128, 192, 128]
        assert f"__launch_bounds__({gemm.THREADS}, 1)" in text
        if own is scatter:
            assert size("COPY_ROWS") == own._COPY_ROWS


def test_operands_are_copied_where_they_have_to_be():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert gemm.by_rows(x) is x and gemm.by_rows(x[:, :32]).data_ptr() == x.data_ptr()
    for odd in (x.flatten()[1:65].view(1, 64), x[:, :1].t(), x.t(), x[:, 1:9], torch.zeros(4, 65, dtype=x.dtype)[:, :64]):
        fit = gemm.by_rows(odd)
        assert fit.data_ptr() % 16 == 0 and fit.stride(1) == 1 and fit.stride(0) % 8 == 0 and torch.equal(fit, odd)
    weight = torch.zeros(64, 32, dtype=x.dtype)
    for weights, rows in (
        ([weight], True),
        ([weight.t()], False),
        ([weight, weight.t()], False),
        ([weight[:, 1:9]], False),
    ):
        taken, operands = gemm.right_operands(weights)
        assert taken is rows and all(map(gemm.lies_by_rows, operands))
        assert [tuple(b.shape) for b in operands] == [tuple((w if rows else w.t()).shape) for w in weights]
    assert aligned(None) is None and aligned(x[0]).data_ptr() == x.data_ptr()
    assert aligned(x[0, 1:9]).data_ptr() % 16 == 0


def test_rows_of_a_dead_arena_are_not_numbers():
    for dtype in (BF16, FP16, FP8):
        rows = torch.ones(3, 16).to(dtype)
        assert gather._unless(torch.tensor(True), rows).float().isnan().all()
        alive = gather._unless(torch.tensor(False), rows)
        assert alive.dtype == dtype and torch.equal(alive.float(), rows.float())


@pytest.mark.parametrize(
    "odd",
    [
        {"columns": 64},
        {"columns": None},
        {"cluster": 4},
        {"split": 2},
        {"cluster": 2, "split": 3},
        {"split": True},
        {"stages": 1},
        {"across": 1.5},
        {"lead": -1},
        {"pace": "slow"},
    ],
)
def test_there_is_no_such_tiling(odd):
    with pytest.raises(TypeError, match="no such tiling"):
        Tiling(**odd)


def test_what_the_kernel_cannot():
    assert gemm.cannot(64, 512, 512, (torch.float32,) * 2) == "dtype torch.float32, torch.float32"
    assert "multiple of 8" in gemm.cannot(64, 511, 512, (BF16, BF16))
    assert "multiple of 16" in gemm.cannot(64, 512, 504, (FP8, FP8), BF16)
    assert not gemm.cannot(64, 512, 512, (FP8, FP8), BF16)
    for dtypes, out_dtype in (((FP8, torch.float8_e5m2), BF16), ((FP8, FP8), torch.float32), ((FP8, FP8), None)):
        assert gemm.cannot(64, 512, 512, dtypes, out_dtype).startswith("dtype")
    assert gemm.cannot(0, 512, 512, (BF16, BF16)) and not gemm.cannot(1, 8, 8, (FP16, FP16))


build_version = build._compiler()[2]
