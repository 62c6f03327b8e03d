"""Which candidate to run for which size: measured tables, as data. Looking one up touches no device and no process group.

A table belongs to one kind of machine (``Machine``). Its entries are by operation and by size, each a list of choices by
ascending row count; a choice holds up to the next one.

The size of an all-reduce is its bytes per row. Between two sizes the nearer one answers (on a log scale), at the row count
that makes a message of the same bytes. A plain all-reduce has no rows: its entries are under the one size
``PLAIN_ROW_BYTES``, so that their "rows" are bytes.

The size of a GEMM with a collective is (N, K), columns and inner dimension on a rank; its rows are those of the whole. The
nearest size answers, at the same rows, unless it is another kind of matrix altogether (``MOST_APART``).

Whether a model's rows are whole or sharded (``enable_sp``) is under ``SEQUENCE_PARALLEL``, by bytes per row of its hidden
states. The nearest size answers, at the same rows, unless it is ``MOST_APART``.

The file is JSON: {"format": 2, "machine": {...}, "versions": {...},
"ops": {op: {bytes per row or "NxK": [[from rows, candidate, {option: number or null}]]}}}.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

from tpfuse.errors import ConfigError

FORMAT = 2
PLAIN_ROW_BYTES = 1
MOST_APART = 4  # a size answers for N and K, or hidden sizes, that are up to so many times as large or small
#: By whether ``fuse_gemm_comms`` is on: the operation whose choices are ``WHOLE`` and ``SHARDED``.
SEQUENCE_PARALLEL = {False: "sequence_parallel", True: "sequence_parallel_gemm_comms"}
WHOLE, SHARDED = "whole", "sharded"
_SHIPPED = pathlib.Path(__file__).parent
_CACHE_VARIABLE = "TPFUSE_CACHE_DIR"

#: Of an option of a choice.
Value: TypeAlias = "int | float | None"
#: Bytes per row, or (N, K) on a rank.
Size: TypeAlias = "int | tuple[int, int]"
#: Ascending (from rows, choice) pairs; the first is from 1.
Entries: TypeAlias = "tuple[tuple[int, Choice], ...]"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a table was measured on and is valid for.

    gpu      the device's name, of CPU ranks the processor's kind
    link     how its GPUs are connected: "nvlink", "pcie" or "unknown"; "host": CPU ranks
    world    ranks of the process group
    """

    gpu: str
    link: str
    world: int

    def __str__(self) -> str:
        return f"{self.world} x {self.gpu} ({self.link})"


@dataclasses.dataclass(frozen=True, init=False)
class Choice:
    """One candidate, and for our own kernels how it is laid over the hardware.

    options  of an all-reduce those of kernels/layout.py, of a GEMM the fields of kernels/cuda/gemm.py's Tiling; what is not
             there is by the kernel's own rule
    """

    candidate: str
    options: tuple[tuple[str, Value], ...]

    def __init__(self, candidate: str, **options: Value) -> None:
        object.__setattr__(self, "candidate", candidate)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def get(self, option: str) -> Any:
        """An option, None if it is not there."""
        return dict(self.options).get(option)

    def __str__(self) -> str:
        return " ".join([self.candidate, *(f"{name}={value}" for name, value in self.options)])


@dataclasses.dataclass(frozen=True)
class Table:
    """Choices by operation, size and rows. ``versions`` says what they were measured with."""

    machine: Machine
    ops: Mapping[str, Mapping[Size, Entries]]
    versions: Mapping[str, str]

    def choose(self, op: str, rows: int, row_bytes: int) -> Choice | None:
        """The choice for a message of ``rows`` rows of ``row_bytes`` bytes; None: the table does not know the operation.

        It may name a candidate that this version of tpfuse does not have: whoever asks has to look.
        """
        known = [size for size in self.ops.get(op, ()) if isinstance(size, int)]
        if not known:
            return None
        nearest = min(known, key=lambda size: (_apart(size, row_bytes), size))
        return _at(self.ops[op][nearest], rows * row_bytes // nearest)

    def choose_matmul(self, op: str, rows: int, columns: int, inner: int) -> Choice | None:
        """As above, for a GEMM of M = ``rows`` of the whole, and N and K of a rank. None also: it knows no such matrix."""
        known = [size for size in self.ops.get(op, ()) if isinstance(size, tuple)]
        if not known:
            return None
        nearest = min(known, key=lambda size: (_apart(size[0], columns) + _apart(size[1], inner), size))
        far = max(_apart(nearest[0], columns), _apart(nearest[1], inner)) > math.log(MOST_APART) + 1e-9
        return None if far else _at(self.ops[op][nearest], rows)

    def sharded_from(self, op: str, row_bytes: int) -> tuple[float, int] | None:
        """(row count from which sharding was faster at all that were measured, infinite if at none; bytes per row there).

        op  one of ``SEQUENCE_PARALLEL``
        None: the table knows no hidden size like that.
        """
        known = [size for size in self.ops.get(op, ()) if isinstance(size, int)]
        nearest = min(known, key=lambda size: (_apart(size, row_bytes), size), default=None)
        if nearest is None or _apart(nearest, row_bytes) > math.log(MOST_APART) + 1e-9:
            return None
        fewest = math.inf
        for start, choice in reversed(self.ops[op][nearest]):
            if choice.candidate != SHARDED:
                break
            fewest = start
        return fewest, nearest

    def candidates(self, op: str) -> tuple[str, ...]:
        """Names of all candidates that the table chooses for an operation."""
        return tuple(dict.fromkeys(choice.candidate for entries in self.ops.get(op, {}).values() for _, choice in entries))

    def replace(self, ops: Mapping[str, Mapping[Size, Entries]], versions: Mapping[str, str]) -> Table:
        """This table with the sizes of ``ops`` put in the place of its own; it keeps its others."""
        merged = {op: {**self.ops.get(op, {}), **ops.get(op, {})} for op in (*self.ops, *ops)}
        return Table(self.machine, merged, versions)

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "machine": dataclasses.asdict(self.machine),
            "versions": dict(sorted(self.versions.items())),
            "ops": self._listed(),
        }
        return json.dumps(document, indent=1) + "\n"

    def _listed(self) -> dict[str, dict[str, list[list[Any]]]]:
        return {
            op: {
                size_name(size): [[start, choice.candidate, dict(choice.options)] for start, choice in by_size[size]]
                for size in sorted(by_size, key=lambda size: (size,) if isinstance(size, int) else size)
            }
            for op, by_size in sorted(self.ops.items())
        }

    @property
    def digest(self) -> str:
        """Equal for tables with equal choices, whatever they were measured with: what ranks compare."""
        return hashlib.sha256(json.dumps(self._listed()).encode()).hexdigest()[:16]


def size_name(size: Size) -> str:
    """As a table's file has it."""
    return str(size) if isinstance(size, int) else "x".join(map(str, size))


def _apart(one: int, other: int) -> float:
    return abs(math.log(one / other))


def _at(entries: Entries, rows: int) -> Choice:
    index = bisect.bisect_right([start for start, _ in entries], rows) - 1
    return entries[max(index, 0)][1]


# -- from JSON ---------------------------------------------------------------------------------------------------------


def parse(text: str, source: str) -> Table:
    """A table from its JSON. Raises ConfigError: malformed, partial or of another format; ``source`` is named in it."""
    try:
        document = json.loads(text)
        found = document["format"]
        if found == FORMAT:
            return _table(document)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        # A KeyError's text is no more than the key.
        told = f"{error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{source} is not a table of tpfuse ({told}); run tpfuse tune") from error
    raise ConfigError(f"{source}: format {found!r}, this version of tpfuse reads {FORMAT}; run tpfuse tune")


def _table(document: dict[str, Any]) -> Table:
    machine = document["machine"]
    ops = {}
    for op, by_size in document["ops"].items():
        ops[op] = {_size(name): _entries(listed) for name, listed in by_size.items()}
        if len(ops[op]) < len(by_size):
            raise ValueError(f"{op}: each size must be there once, got {list(by_size)}")
    return Table(
        Machine(_text(machine["gpu"]), _text(machine["link"]), _count(machine["world"])),
        ops,
        {name: _text(version) for name, version in document["versions"].items()},
    )


def _size(name: str) -> Size:
    numbers = [_count(int(part)) for part in name.split("x")]
    if len(numbers) > 2:
        raise ValueError(f"expected bytes per row or NxK, got {name!r}")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _entries(listed: list[Any]) -> Entries:
    entries = tuple((_count(start), Choice(_text(name), **_options(options))) for start, name, options in listed)
    starts = [start for start, _ in entries]
    if not starts or starts[0] != 1 or starts != sorted(set(starts)):
        raise ValueError(f"row counts must ascend from 1, got {starts}")
    return entries


def _options(given: dict[str, Any]) -> dict[str, Value]:
    for name, value in given.items():
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):  # a bool is an int too
            raise ValueError(f"expected an option with a number that is not negative, got {name!r}: {value!r}")
    return given


def _count(value: Any) -> int:
    if type(value) is int and value > 0:
        return value
    raise ValueError(f"expected a positive whole number, got {value!r}")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"expected a text, got {value!r}")


# -- files -------------------------------------------------------------------------------------------------------------


def file_name(machine: Machine) -> str:
    """Name of the file that holds the table of a machine."""
    gpu = "".join(c if c.isascii() and c.isalnum() else "_" for c in machine.gpu)
    return f"{gpu}-{machine.link}-x{machine.world}.json"


def cache_folder() -> pathlib.Path:
    """Where tuned tables are kept: TPFUSE_CACHE_DIR, else ~/.cache/tpfuse. Raises ConfigError: there is no home folder."""
    given = os.environ.get(_CACHE_VARIABLE)
    if given:
        return pathlib.Path(given)
    try:
        return pathlib.Path.home() / ".cache" / "tpfuse"
    except RuntimeError as error:
        raise ConfigError(f"there is no home folder to keep tuned tables in: set {_CACHE_VARIABLE}") from error


def tuned_path(machine: Machine) -> pathlib.Path:
    """Where the tuned table of a machine is, or would be."""
    return cache_folder() / file_name(machine)


def load(path: pathlib.Path, machine: Machine) -> Table | None:
    """The table in a file, None if there is no such file. Raises ConfigError: unreadable, corrupt or of another machine."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a table of tpfuse (it is no text); run tpfuse tune") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); mend that or run tpfuse tune") from error
    table = parse(text, str(path))
    if table.machine != machine:
        raise ConfigError(f"{path} was measured on {table.machine}, this is {machine}; run tpfuse tune")
    return table


def find(machine: Machine) -> tuple[Table | None, str]:
    """The tuned table of this machine, else the one that ships, else None; and where it is from (or why there is none).

    A table that cannot be used (corrupt, partial, of another machine or format) is left aside, and told. Never raises:
    what one rank finds must not keep it from telling the others.
    """
    told = ""
    try:
        path = tuned_path(machine)
        table = load(path, machine)
        if table is not None:
            return table, f"tuned: {path}"
    except ConfigError as error:
        told = f"{error}; "
    try:
        table = shipped(machine)
        if table is not None:
            return table, f"{told}shipped with tpfuse"
    except ConfigError as error:
        told += f"{error}; "
    return None, f"{told}no table for {machine}: run tpfuse tune"


@functools.cache
def shipped(machine: Machine) -> Table | None:
    """The table that comes with tpfuse for this machine. Raises ConfigError: it is broken."""
    return load(_SHIPPED / file_name(machine), machine)


def save(table: Table, path: pathlib.Path | None = None) -> pathlib.Path:
    """Write a table to ``path``, by default the cache; returns where. Raises OSError: it cannot be, and nothing is changed.

    It goes to a temporary file first, so that a reader never sees half of it.
    """
    path = path or tuned_path(table.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(table.to_json())
            file.flush()
            os.fsync(file.fileno())  # a full disk is told here at the latest
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
