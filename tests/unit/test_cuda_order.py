"""The order in which our CUDA kernels compute tiles, by the kernels' own functions, compiled for the CPU."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import shutil
import subprocess

import pytest

import tpfuse.kernels.cuda
from tpfuse.kernels.cuda.gemm import Tiling

FOLDER = pathlib.Path(tpfuse.kernels.cuda.__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
_HEAD = """
#include <algorithm>
using std::min;
#define INLINE inline
#ifndef CLUSTER
#define CLUSTER 1
#define SPLIT 1
#endif
#define STACK (CLUSTER / SPLIT)
constexpr int BM = 128, SUM_ROWS = BM / SPLIT, BK = 64, BN = 256, NARROW = 128, SLICES = 2;
static int here;
static int cluster_place() { return here; }
static int stack_place() { return STACK == 1 ? 0 : here; }
"""
_SCATTER = """
extern "C" void order(int count, int tiles, int lead, int down, int across, int* out) {
  for (int n = 0; n < count; n++) {
    Unit t = unit_at(n, tiles, lead);
    Place at = place(t.number, down, tiles / down, across);
    int row[5] = {t.own, t.peer, t.number, at.row, at.column};
    for (int i = 0; i < 5; i++) out[5 * n + i] = row[i];
  }
}
"""
_SLICES = """
extern "C" int slices(int units, int whole, int* out) {
  int count = slices_of(units, whole);
  for (int n = 0; n < count; n++) {
    Slice s = slice_at(n, whole);
    int row[3] = {s.unit, s.first, s.columns};
    for (int i = 0; i < 3; i++) out[3 * n + i] = row[i];
  }
  return count;
}
"""
_ROWS = """
extern "C" void rows(int row, int steps, int* out) {
  for (here = 0; here < CLUSTER; here++) {
    Place at = {row, 0};
    Steps s(steps);
    int of[4] = {row_of(at), own_row_of(at), s.first, s.end};
    for (int i = 0; i < 4; i++) out[4 * here + i] = of[i];
  }
}
"""
_GATHER = """
extern "C" void order(int count, int down, int per_rank, const int* columns, int across, int* out) {
  Params p;
  for (int m = 0; m < MATRICES; m++) p.columns[m] = columns[m];
  p.across = across;
  for (int n = 0; n < count; n++) {
    Unit t = unit_at(p, n, down, per_rank);
    int row[4] = {t.source, t.matrix, t.at.row, t.at.column};
    for (int i = 0; i < 4; i++) out[4 * n + i] = row[i];
  }
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def part(file: str, start: str, end: str | None = None) -> str:
    text = (FOLDER / file).read_text()
    first = text.index(start)
    return text[first : text.index(end, first) if end else None]


def build(tmp_path: pathlib.Path, name: str, source: str, **macros: int) -> ctypes.CDLL:
    file, library = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
    constants = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    file.write_text(constants + _HEAD + part("tiles.cuh", "struct Slice") + source)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-std=c++17", "-o", str(library), str(file)], check=True)
    return ctypes.CDLL(str(library))


def rows_of(out: ctypes.Array, width: int) -> list[tuple[int, ...]]:
    return [*zip(*[iter(out)] * width, strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_reduce_scatter(tmp_path, world):
    """Every tile once; an own one after those of the same number for all peers, and after the lead."""
    source = part("matmul_reduce_scatter.cu", "struct Unit", "INLINE int steps_of(") + _SCATTER
    library = build(tmp_path, "scatter", source, WORLD=world, PEERS=world - 1)
    for down, columns, across in itertools.product((1, 3, 8, 13), (1, 5, 8), (1, 4, 8)):
        tiles = down * columns
        theirs = tiles * (world - 1)
        for lead in {0, world - 1, 5 * (world - 1), theirs}:
            if lead > theirs:
                continue
            out = (ctypes.c_int * (5 * tiles * world))()
            library.order(tiles * world, tiles, lead, down, across, out)
            order = rows_of(out, 5)
            assert len({(own, own or peer, number) for own, peer, number, *_ in order}) == tiles * world
            assert {(row, column) for *_, row, column in order} == {*itertools.product(range(down), range(columns))}
            place = {(own, -1 if own else peer, number): n for n, (own, peer, number, *_) in enumerate(order)}
            for number in range(tiles):
                sent = [place[0, peer, number] for peer in range(world - 1)]
                assert max(sent) < place[1, -1, number]
            assert all(own == 0 for own, *_ in order[:lead])


def test_slices(tmp_path):
    """Every column of every unit once, unit after unit; the last round takes half of the time where that will do."""
    library = build(tmp_path, "slices", _SLICES)
    for units, multiprocessors, cluster in itertools.product(
        (1, 5, 64, 66, 67, 131, 132, 133, 198, 199, 448), (132, 78), (1, 2)
    ):
        cut = Tiling(256, 3, cluster)
        blocks, whole = cut.grid(multiprocessors, units * cluster)
        out = (ctypes.c_int * (6 * units))()
        count = library.slices(units, whole, out)
        slices = rows_of(out, 3)[:count]
        covered = [(unit, first + column) for unit, first, columns in slices for column in range(0, columns, 128)]
        assert covered == [*itertools.product(range(units), (0, 128))]
        at_once = blocks // cluster
        assert blocks == at_once * cluster <= multiprocessors and at_once <= count
        longest = max(sum(columns for _, _, columns in slices[first::at_once]) for first in range(at_once))
        assert Tiling(128, 6, cluster).grid(multiprocessors, units * cluster)[1] == units
        rounds, rest = divmod(2 * units, 2 * (multiprocessors // cluster))
        assert longest == 256 * rounds + (0 if not rest else 128 if rest <= multiprocessors // cluster else 256)


@pytest.mark.parametrize(("cluster", "split"), [(1, 1), (2, 1), (2, 2)])
def test_what_a_cluster_shares(tmp_path, cluster, split):
    """Its tiles, or all steps of K and all rows of one tile: each once."""
    source = part("gemm.cuh", "struct Steps") + _ROWS
    library = build(tmp_path, "rows", source, CLUSTER=cluster, SPLIT=split)
    for steps in range(split, 9):
        loaded, summed, parts = set(), [], []
        for unit in range(3):
            out = (ctypes.c_int * (4 * cluster))()
            library.rows(unit, steps, out)
            for tile, first, *of_k in rows_of(out, 4):
                loaded.add(tile)
                summed += range(first, first + 128 // split)
                assert tile <= first < tile + 128 and of_k[0] < of_k[1]
                parts.append((tile, *of_k))
        assert summed == [*range(128 * len(loaded))] and loaded == {128 * n for n in range(3 * cluster // split)}
        for tile in loaded:
            assert [k for t, *of_k in parts if t == tile for k in range(*of_k)] == [*range(steps)]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_all_gather(tmp_path, world):
    """This rank's rows, then those of the rank before, and so on; every tile of every matrix once."""
    source = (
        "struct Params { int columns[MATRICES], across; };\n"
        + part("all_gather_matmul.cu", "struct Unit", "INLINE int pieces_of")
        + _GATHER
    )
    library = build(tmp_path, "gather", source, WORLD=world, PEERS=world - 1, MATRICES=3)
    for down, across, columns in itertools.product((1, 5), (1, 8), ((256, 8, 700), (2048, 256, 256), (8, 8, 8))):
        wide = [-(-n // 256) for n in columns]
        per_rank = down * sum(wide)
        out = (ctypes.c_int * (4 * per_rank * world))()
        library.order(per_rank * world, down, per_rank, (ctypes.c_int * 3)(*columns), across, out)
        order = rows_of(out, 4)
        for turn in range(world):
            mine = order[turn * per_rank : (turn + 1) * per_rank]
            assert {source for source, *_ in mine} == {-1 if turn == 0 else world - 1 - turn}
            every = {(m, row, column) for m in range(3) for row in range(down) for column in range(wide[m])}
            assert {(m, row, column) for _, m, row, column in mine} == every and len(mine) == len(every)
