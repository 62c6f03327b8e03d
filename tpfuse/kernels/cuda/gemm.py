"""What our GEMM kernels need on the host: operands as the tensor memory accelerator wants them, tiles, and options.

M  rows     K  inner dimension     N  columns
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence

import torch

from tpfuse.comm import agreement, groups
from tpfuse.comm.workspace import Workspace
from tpfuse.errors import BuildError
from tpfuse.kernels.cuda import build
from tpfuse.kernels.cuda.launch import TensorMap, tensor_map

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}  # of results, and of operands if they are not FP8
FP8 = torch.float8_e4m3fn
TILE_ROWS, STEP_BYTES, BOX = 128, 128, 64  # BM, BK_BYTES and the columns of a box of results in gemm.cuh
COLUMNS = (128, 192, 256)  # of a tile
THREADS, LEAST_STAGES, MOST_STAGES = 384, 2, 8
MOST_SHARED_BYTES = 226 << 10  # of a block, its barriers aside
ALIGNMENT_BYTES = 1024  # of stages and tiles in shared memory
_POINTER_ALIGNMENT, _SWIZZLED_ROWS = 16, 8
_SPEEDS = {128: 0.92, 192: 0.96, 256: 1.0}  # of tiles of so many columns, on an H200 beside the widest
_SLICE_TIME = 0.58  # of a tile's
_FLOP_PER_CLOCK = 8192  # of one multiprocessor, divided by the bytes of an element


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    columns  of a tile, one of ``COLUMNS``; stages: of its operands in shared memory, two or more: one is freed when the
             next one has been begun
    cluster  multiprocessors, 1 or 2, that share what they load of the weight, or a tile
    split    parts of K that the cluster's multiprocessors have of one tile: 1, or as many as those
    across   rows of tiles that are computed together, for the L2 cache
    lead     reduce-scatter: tiles of the peers, per multiprocessor, before own ones are mixed in; None: all of them
    pace     pause between pieces that are sent, as a share of what would spread them over the time there is
    """

    columns: int = 256
    stages: int = 3
    cluster: int = 1
    across: int = 8
    lead: int | None = None
    pace: float = 0.8
    split: int = 1

    def __post_init__(self) -> None:
        """Raises TypeError: there is no such tiling; it may come from a file."""
        numbers = (self.columns, self.stages, self.cluster, self.across, self.split)
        lead = self.lead is None or (type(self.lead) is int and self.lead >= 0)
        sizes = all(type(n) is int and n > 0 for n in numbers) and self.columns in COLUMNS and self.cluster in (1, 2)
        sizes = sizes and self.split in (1, self.cluster) and self.stages >= LEAST_STAGES
        if not (sizes and lead and isinstance(self.pace, (int, float)) and self.pace >= 0):
            raise TypeError(f"no such tiling: {self}")

    @property
    def wide_bytes(self) -> int:
        """Of shared memory for the stages of whole tiles."""
        return self.stages * (TILE_ROWS + self.columns) * STEP_BYTES

    def operand_bytes(self, beside: int) -> int:
        """Of shared memory for all stages; of narrow ones there are as many as there is room for beside so many bytes."""
        narrow = (TILE_ROWS + self.narrow) * STEP_BYTES
        left = MOST_SHARED_BYTES - ALIGNMENT_BYTES - beside
        return max(self.wide_bytes, left // narrow * narrow if self.slices > 1 else 0)

    def room(self, beside: int) -> int:
        """Bytes of shared memory, so many beside the stages."""
        return self.operand_bytes(beside) + ALIGNMENT_BYTES + beside

    def tile_bytes(self, itemsize: int) -> int:
        """Of what a multiprocessor sums up of a tile, in results or partial sums."""
        return TILE_ROWS // self.split * self.columns * itemsize

    @property
    def exchange_bytes(self) -> int:
        """Of shared memory for what the multiprocessors of a tile give each other: Exchange in gemm.cuh."""
        columns = self.columns if self.columns == COLUMNS[0] else self.columns // 2
        return TILE_ROWS // self.split * columns * 4 if self.split > 1 else 0

    @property
    def stack(self) -> int:
        """Tiles of a cluster, one below the other."""
        return self.cluster // self.split

    @property
    def unit_rows(self) -> int:
        """Of a cluster's tiles together."""
        return TILE_ROWS * self.stack

    def tiles(self, rows: int, columns: int) -> int:
        """Of a matrix, or parts of them, with those of nothing that fill up the last cluster."""
        return -(-rows // self.unit_rows) * self.cluster * -(-columns // self.columns)

    @property
    def narrow(self) -> int:
        """Columns of a slice of a tile: NARROW in gemm.cuh."""
        return 128 if self.columns == 256 else self.columns

    @property
    def slices(self) -> int:
        """That a tile may be cut into."""
        return self.columns // self.narrow

    @property
    def box_columns(self) -> int:
        """Of a weight with K contiguous that are loaded at once."""
        return self.narrow // self.stack

    def suiting(self, b_rows: bool, steps: int) -> Tiling:
        """It, or without clusters where they cannot share what there is.

        That is a weight with N contiguous, in whole boxes, or so many steps of K.
        """
        apart = steps < self.split or (b_rows and self.box_columns % BOX)
        return dataclasses.replace(self, cluster=1, split=1) if apart else self

    def grid(self, multiprocessors: int, tiles: int) -> tuple[int, int]:
        """(blocks, all resident, whole clusters; units that are computed whole, the last ones being cut into slices)

        A last round that leaves half of the multiprocessors idle is done by all of them in half of the time.
        """
        clusters, units = multiprocessors // self.cluster, tiles // self.cluster
        rest = units % clusters
        whole = units - rest if self.slices > 1 and rest * self.slices <= clusters else units
        return min(clusters, whole + (units - whole) * self.slices) * self.cluster, whole

    def clocks(self, inner: int, dtype: torch.dtype) -> float:
        """Of a multiprocessor, for its part of one tile."""
        return 2 * TILE_ROWS * self.columns * inner * dtype.itemsize / _FLOP_PER_CLOCK / self.split

    def options(
        self, world: int, dtype: torch.dtype, out_dtype: torch.dtype, b_rows: bool, beside: int
    ) -> tuple[tuple[str, int], ...]:
        """Macros that every kernel is compiled with. b_rows: B has N contiguous, not K; beside: see ``operand_bytes``."""
        stages = (("STAGES", self.stages), ("OPERAND_BYTES", self.operand_bytes(beside)))
        sizes = (("BN", self.columns), *stages, ("CLUSTER", self.cluster), ("SPLIT", self.split))
        kinds = (("ELEMENT", ELEMENTS[out_dtype]), ("FP8", int(dtype == FP8)), ("B_ROWS", int(b_rows)))
        return ("WORLD", world), *sizes, *kinds


#: Of few tiles, so that twice as many multiprocessors compute them.
SPLIT = Tiling(COLUMNS[0], cluster=2, split=2)
_LEAST_SPLIT_BYTES = 2048  # of a row: less is computed sooner than exchanged


def fastest_columns(
    multiprocessors: int, world: int, rows: int, widths: Sequence[int], among: Sequence[int] = COLUMNS
) -> int:
    """Of tiles, by rule of thumb: wide ones compute faster, but often leave more multiprocessors idle in the last round.

    rows    of each rank
    widths  columns of all weights
    among   those of tiles for which there is room
    """

    def time(columns: int) -> float:
        cut = Tiling(columns)
        units = sum(cut.tiles(rows, width) for width in widths) * world
        _, whole = cut.grid(multiprocessors, units)
        rounds = -(-whole // multiprocessors) + (units > whole) * _SLICE_TIME
        return rounds * columns / _SPEEDS[columns]

    return min(reversed(among), key=time)


def most_stages(cut: Tiling, room: Callable[[Tiling], int]) -> int:
    """Of the operands of such a tiling's tiles for which there is room; 0: for too few."""
    fits = lambda stages: room(dataclasses.replace(cut, stages=stages)) <= MOST_SHARED_BYTES  # noqa: E731
    return max((stages for stages in range(LEAST_STAGES, MOST_STAGES + 1) if fits(stages)), default=0)


def pays_to_split(
    multiprocessors: int, world: int, rows: int, widths: Sequence[int], inner: int, dtype: torch.dtype
) -> bool:
    """Whether ``SPLIT``, by rule of thumb, is the fastest: all its tiles are computed at once, and K is long enough.

    In a second round they would load the weight once more.
    """
    units = sum(SPLIT.tiles(rows, width) for width in widths) // SPLIT.cluster * world
    return units <= multiprocessors // SPLIT.cluster and inner * dtype.itemsize >= _LEAST_SPLIT_BYTES


def cannot(rows: int, columns: int, inner: int, dtypes: Sequence[torch.dtype], out_dtype: torch.dtype | None = None) -> str:
    """Why a kernel cannot do this, wherever; "" if it can. dtypes: of all operands; out_dtype: None: theirs."""
    kinds = {*dtypes}
    out_dtypes = {*ELEMENTS} if dtypes[0] == FP8 else {None, dtypes[0]}
    if len(kinds) > 1 or not kinds <= {FP8, *ELEMENTS} or out_dtype not in out_dtypes:
        return f"dtype {', '.join(map(str, dtypes))}{f' -> {out_dtype}' if out_dtype else ''}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return f"it is for Hopper, not for {torch.cuda.get_device_name()}"
    of_columns, of_inner = _POINTER_ALIGNMENT // 2, _POINTER_ALIGNMENT // dtypes[0].itemsize
    if columns % of_columns or inner % of_inner:
        return f"K = {inner} must be a multiple of {of_inner}, N = {columns} of {of_columns}"
    return "" if rows and columns and inner else "nothing to compute"


def loaded_rows(count: int) -> int:
    """Of a tile, where a rank has so many: no more than there are."""
    return min(TILE_ROWS, -(-count // _SWIZZLED_ROWS) * _SWIZZLED_ROWS)


def steps_of(inner: int, dtype: torch.dtype) -> int:
    """That K is gone through in."""
    return -(-inner * dtype.itemsize // STEP_BYTES)


def lies_by_rows(matrix: torch.Tensor) -> bool:
    """Whether its last dimension is contiguous and its rows on 16-byte boundaries."""
    pitch = matrix.stride(0) * matrix.element_size()
    fits = matrix.stride(1) == 1 and not pitch % _POINTER_ALIGNMENT and not matrix.data_ptr() % _POINTER_ALIGNMENT
    return fits and matrix.stride(0) >= matrix.shape[1]


def by_rows(matrix: torch.Tensor) -> torch.Tensor:
    """It, or a copy that lies by rows."""
    return matrix if lies_by_rows(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def profiling(workspace: Workspace) -> tuple[tuple[str, int], ...]:
    """The macro with which kernels write down what they wait for, where that is wanted."""
    return () if workspace.profile is None else (("PROFILE", 1),)


def parts(share: int, most: int) -> list[tuple[int, int]]:
    """(first row, rows) of launches of at most ``most`` rows of each rank: as few as can be, about the same for all."""
    count = -(-share // most)
    rows = -(-share // count // TILE_ROWS) * TILE_ROWS
    return [(first, min(rows, share - first)) for first in range(0, share, rows)]


def right_operands(weights: Sequence[torch.Tensor]) -> tuple[bool, list[torch.Tensor]]:
    """(whether N is contiguous in all, and not K; weights [K, N] so, or as [N, K], copied where need be)"""
    if (
        weights[0].dtype != FP8
        and all(map(lies_by_rows, weights))
        and not all(lies_by_rows(weight.t()) for weight in weights)
    ):
        return True, list(weights)
    return False, [by_rows(weight.t()) for weight in weights]


def operand(matrix: torch.Tensor, rows: int, box_rows: int) -> TensorMap:
    """The first ``rows`` rows of a matrix that lies by rows."""
    pitch, box = matrix.stride(0) * matrix.element_size(), (STEP_BYTES // matrix.element_size(), box_rows)
    return tensor_map(matrix.data_ptr(), matrix.dtype, (matrix.shape[1], rows), (pitch,), box)


class Scale(ctypes.Structure):
    """``Scale`` of gemm.cuh."""

    _fields_ = (("factors", ctypes.c_uint64), ("each", ctypes.c_int32))

    @classmethod
    def of(cls, factors: torch.Tensor | None, each: bool) -> Scale:
        """Of contiguous fp32: one number, or one for each row or column; None: there is nothing to scale."""
        return cls() if factors is None else cls(factors.data_ptr(), int(each))


def kernel_of(workspace: Workspace, files: tuple[str, ...], options: tuple[tuple[str, int], ...], shared_bytes: int) -> int:
    """The kernel in the last of the files. The first call for a group and options is collective.

    Raises BuildError, on every rank: one of them cannot build it.
    """
    key = files, options
    found, name = workspace.kernels.get(key), build.name_of(files, options)
    if found is None:
        reason, index = "", workspace.arena.device.index
        try:
            found = build.kernel(files, options, shared_bytes, index)
        except BuildError as error:
            reason = str(error)
        group = groups.resolve(workspace.arena.group_name)
        told = agreement.told(agreement.exchange(group, f"building {name}", {"reason": reason}))
        if told:
            raise BuildError(told)
        assert found is not None
        workspace.kernels[key] = found
    return found
