"""The symmetric arena: one block of memory per process group that every rank of it can write, and its epochs and alarms.

    header    state of the blocks of each kernel (epochs: they only grow, and stay on the device); control block
    regions   slots, one region per way of using them; each slot is empty (SENTINEL) until a peer writes it

It is made once per group, by agreement of its ranks and outside any graph capture, and never grows: a captured graph holds
its addresses. Larger messages go through it in pieces. As with NCCL, a group's operations run in one order on all its
ranks; calls from another stream wait for those before them, except inside a capture: parallel branches of one graph must
not use one group. Large calls over two groups on two streams may wait for each other, as NCCL's do. Replays of CUDA
graphs follow the order of the streams that they are launched on: two replays over one group at the same time are not
supported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tpfuse.comm import agreement, groups
from tpfuse.comm.symmetric import SymmetricMemory, may_share_devices
from tpfuse.errors import PeerTimeoutError, first_line

SENTINEL = -0x7FFF8000  # 0x80008000 as a signed 32-bit number; kernels/triton/lamport.py says what it is
VECTOR_BYTES = 16  # of one access of a thread
SLOT_BYTES = 32 << 10  # the longest row that fits
SLOTS = 4  # per block or row and source; a power of two, so that counters may wrap
MAX_SPLIT_ROWS, SPLIT = 32, 4
MAX_RING_BLOCKS = 512
STATE_BYTES = 8
DEFAULT_BYTES = 64 << 20
SUBJECT = "making the arena"
_CAPTURING = "a CUDA graph is being captured"
HEADER_BYTES = 16 << 10
_CONTROL_OFFSET = 8 << 10  # in the header, behind the state
assert (MAX_SPLIT_ROWS * SPLIT + MAX_RING_BLOCKS) * STATE_BYTES <= _CONTROL_OFFSET < HEADER_BYTES
_RECORD_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the arena, the same on every rank. ``state`` is the byte offset of its blocks' state in the header."""

    offset: int
    size: int  # how many rows (split) or blocks (ring) it has slots for
    state: int


class Alone:
    """What a kernel needs instead of an arena where it exchanges nothing."""

    world, rank, peers, control, base, next_base = 1, 0, 0, 0, 0, 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.multiprocessors = device, _multiprocessors(device)
        self.ring = Region(0, 1 << 16, 0)
        self.plans: dict[tuple, Any] = {}

    def enter(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)


class Arena:
    """Symmetric memory of one process group on one device. Made by ``of``; every rank of the group has one, or none has.

    base     address of this rank's block; next_base: of the next rank's
    peers    address of the device table of the ranks' base addresses (int64 each)
    control  address of {int32 abort, int32 -, int64 deadline in ns, int64 address of the record}, in the header
    bytes    of symmetric memory on each rank
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Only the part that cannot hang: this rank's memory."""
        self.group_name, self.rank, self.world = group.group_name, group.rank(), group.size()
        self.device, self.bytes = device, size
        self.multiprocessors = _multiprocessors(device)  # of the rank that has the fewest: grids are the same on all
        self.split, self.ring = layout(size, self.world)
        self._group = weakref.ref(group)
        self._symmetric = SymmetricMemory(device, size)
        self._memory = self._symmetric.tensor
        self._record = torch.zeros(_RECORD_WORDS, dtype=torch.int32).pin_memory()
        self._seen = self._record.numpy()  # reads without a torch call
        self._stream = -1  # of the call before; no stream has that handle, the default stream has 0
        self._last: torch.cuda.Stream | None = None
        self.failure = ""
        self.plans: dict[tuple, Any] = {}  # what kernels want to keep for as long as the arena lives
        self.workspace: Any = None  # of GEMMs: see workspace.py
        self.alone = Alone(device)

    def connect(self, group: dist.ProcessGroup, name: str, timeout_s: float) -> None:
        """The collective part: exchange addresses, empty every slot. name: see SymmetricMemory."""
        self._symmetric.connect(group, name)
        self._memory[: HEADER_BYTES // 4].zero_()
        self._memory[HEADER_BYTES // 4 :].fill_(SENTINEL)
        self.peers, bases = self._symmetric.table, self._symmetric.bases
        self.base, self.next_base = bases[self.rank], bases[(self.rank + 1) % self.world]
        self.control = self.base + _CONTROL_OFFSET
        self._control_word(2).fill_(self._record.data_ptr())
        self.set_deadline(timeout_s)
        torch.cuda.synchronize(self.device)

    @property
    def aborted(self) -> torch.Tensor:
        """Whether a kernel has given up waiting for a peer, on the device: a bool."""
        return self._memory[_CONTROL_OFFSET // 4] != 0

    def _control_word(self, index: int) -> torch.Tensor:
        """Word ``index`` of the control block, as one int64."""
        start = _CONTROL_OFFSET // 4 + 2 * index
        return self._memory[start : start + 2].view(torch.int64)

    def set_deadline(self, seconds: float) -> None:
        """How long a kernel waits for a peer before it gives up."""
        with plain_tensors():
            self._control_word(1).fill_(int(seconds * 1e9))
        self.deadline_s = seconds

    def enter(self) -> int:
        """The current stream, after whatever was launched for this arena on another one. Raises PeerTimeoutError."""
        if self._seen[0]:
            self.check()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream:
            self._follow(stream)
        return stream

    def _follow(self, stream: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # a captured graph cannot wait for what is outside it; the user orders its replays
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last.record_event())
        self._stream, self._last = stream, torch.cuda.current_stream(self.device)

    def check(self) -> None:
        """Raise PeerTimeoutError if a kernel has given up waiting for a peer, now or before. Does not synchronise."""
        if not self.failure and self._seen[0]:
            self.failure = self._told()
            _abort(self._group())
        if self.failure:
            raise PeerTimeoutError(self.failure)

    def _told(self) -> str:
        _, tag, epoch, _ = (int(word) for word in self._seen)
        op, region = TAGS.get(tag & 0xFF, ("?", "ring"))
        peer, block = (tag >> 8) & 0xFF, tag >> 16
        seen = self._epoch_of(peer, getattr(self, region).state + block * STATE_BYTES) if region else -1
        return (
            f"{op}: rank {self.rank} of group {self.group_name!r} waited {self.deadline_s:g} s for rank {peer} and gave up "
            f"(block {block}: expected epoch {epoch}, the peer's is {seen}). What it waited for is NaN, nothing computed "
            "since then is to be trusted, and the group cannot be used any more. The peer has died, hangs, or was called "
            "with other shapes or in another order"
        )

    def _epoch_of(self, peer: int, offset: int) -> int:
        """A block's epoch on another rank, read past whatever this rank's other streams wait for; -1: cannot be read
        now."""
        if torch.cuda.is_current_stream_capturing():
            return -1
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            return self._symmetric.word_of(peer, offset)


#: Low byte of a kernel's tag -> (operation, region of the arena that it uses, or none). Byte 1 of a tag is the peer, the
#: rest the block.
TAGS = {
    1: ("all_reduce_rms_norm by tpfuse_split", "split"),
    2: ("all_reduce_rms_norm by tpfuse_ring", "ring"),
    3: ("all_reduce by tpfuse_ring", "ring"),
    4: ("matmul_reduce_scatter by tpfuse", ""),
    5: ("all_gather_matmul by tpfuse", ""),
    6: ("matmul_all_reduce by tpfuse", ""),
}

_arenas: weakref.WeakKeyDictionary[dist.ProcessGroup, Arena | str] = weakref.WeakKeyDictionary()


def of(group_name: str, size: int = DEFAULT_BYTES) -> Arena | str:
    """The arena of a group, or why it has none. The first call makes it; that one is collective, later ones are local.

    size  bytes on each rank; only the first call's counts
    """
    group = groups.resolve(group_name)
    found = _arenas.get(group)
    if found is None:
        with plain_tensors():
            found = _make(group, size)
        if not is_passing(found):
            _arenas[group] = found
    return found


def is_passing(found: Any) -> bool:
    """Whether what ``of`` gave is a reason that the next call may not meet."""
    return isinstance(found, str) and _CAPTURING in found


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made in here are ordinary ones, whatever mode (inference, fake tensors while compiling) the caller is in."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def check() -> None:
    """Raise PeerTimeoutError if a kernel of any group has given up waiting. Does not synchronise."""
    for arena in list(_arenas.values()):
        if isinstance(arena, Arena):
            arena.check()


def _make(group: dist.ProcessGroup, size: int) -> Arena | str:
    """Every step that may fail on one rank is followed by an exchange, so that all ranks have an arena or none has."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    arena: Arena | None = None
    reason = _unfit(group, device)
    if not reason:
        try:
            arena = Arena(group, device, size)
        except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError
            reason = f"no memory for the arena: {first_line(error)}"
    if not groups.has_peers(group):
        return reason
    facts = {"host": _host(), "device": _identity(device), "bytes": str(size), "name": uuid.uuid4().hex}
    facts |= {"multiprocessors": str(_multiprocessors(device)), "shares": str(may_share_devices())}
    everybody = agreement.exchange(group, SUBJECT, {"reason": reason, **facts})
    reason = agreement.told(everybody) or _mismatch(everybody)
    if reason:
        return reason
    assert arena is not None
    arena.multiprocessors = min(int(each["multiprocessors"]) for each in everybody)
    try:
        arena.connect(group, f"tpfuse/arena/{everybody[0]['name']}", groups.timeout(group).total_seconds())
    except RuntimeError as error:
        reason = f"the ranks cannot reach each other's memory: {first_line(error)}"
    return agreement.told(agreement.exchange(group, SUBJECT, {"reason": reason})) or arena


def _unfit(group: dist.ProcessGroup, device: torch.device) -> str:
    if device.type != "cuda":
        return "no CUDA device"
    if not groups.has_peers(group):
        return "the group has no peers"
    if all(each.type != "cuda" for each in group._device_types):
        return "the group carries no CUDA tensors"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"compute capability 9.0 is needed, {torch.cuda.get_device_name(device)} has less"
    if torch.cuda.is_current_stream_capturing():
        return f"{_CAPTURING}: call once before (the arena cannot be made inside a capture)"
    return ""


def _mismatch(everybody: list[dict[str, str]]) -> str:
    different = lambda fact: len({each[fact] for each in everybody})  # noqa: E731
    if different("host") > 1:
        return "the ranks are on several hosts"
    if different("device") < len(everybody) and any(each["shares"] != "True" for each in everybody):
        return "two ranks share one device"
    if different("bytes") > 1:
        return "the ranks ask for different arena sizes"
    return ""


def layout(size: int, world: int) -> tuple[Region, Region]:
    """The regions of an arena. Raises ValueError: too small for one block."""
    block = SLOTS * (world - 1) * SLOT_BYTES
    rows = min(MAX_SPLIT_ROWS, (size - HEADER_BYTES) // (4 * block))
    blocks = min(MAX_RING_BLOCKS, (size - HEADER_BYTES - rows * block) // block)
    if rows < 1 or blocks < 1:
        raise ValueError(
            f"an arena of {size} bytes is too small for {world} ranks: {HEADER_BYTES + 4 * block} are the least"
        )
    ring = HEADER_BYTES + rows * block
    return Region(HEADER_BYTES, rows, 0), Region(ring, blocks, MAX_SPLIT_ROWS * SPLIT * STATE_BYTES)


def _abort(group: dist.ProcessGroup | None) -> None:
    """End what NCCL still has running over the group: its peers will not answer there either."""
    if group is not None and groups.exists(group):
        group.abort()


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(socket.gethostname())
