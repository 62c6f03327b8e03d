"""Measured tables: which choice answers between measured sizes, what a file may be, and how one is written."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from tpfuse import tables
from tpfuse.errors import ConfigError
from tpfuse.tables import Choice, Machine, Table

OP, MATMUL = "all_reduce_rms_norm", "matmul_reduce_scatter"
SMALL, LARGE = Choice("tpfuse", columns=128, lead=None, pace=0.5), Choice("tpfuse", columns=256, lead=2, pace=0)
MACHINE = Machine("NVIDIA H200", "nvlink", 2)
SPLIT, RING, WIDE, NCCL = (
    Choice("tpfuse_split", warps=8),
    Choice("tpfuse_ring", warps=8, blocks=264),
    Choice("tpfuse_ring", warps=16),
    Choice("nccl"),
)
TABLE = Table(
    MACHINE,
    {
        OP: {8192: ((1, SPLIT), (8, RING), (1024, NCCL)), 16384: ((1, SPLIT), (4, WIDE), (512, NCCL))},
        "all_reduce": {tables.PLAIN_ROW_BYTES: ((1, RING), (1 << 20, NCCL))},
        MATMUL: {(4096, 7168): ((1, NCCL), (256, SMALL), (4096, LARGE)), (8192, 14336): ((1, LARGE),)},
    },
    {"torch": "2.11.0", "triton": "3.6.0", "tpfuse": "0.1.0"},
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "_SHIPPED", tmp_path / "shipped")
    tables.shipped.cache_clear()
    yield tmp_path / "cache"
    tables.shipped.cache_clear()


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        *((rows, 8192, SPLIT) for rows in (1, 2, 7)),
        *((rows, 8192, RING) for rows in (8, 9, 1023)),
        *((rows, 8192, NCCL) for rows in (1024, 1025, 1 << 20)),
        *((rows, 16384, SPLIT) for rows in (1, 3)),
        *((rows, 16384, WIDE) for rows in (4, 511)),
        (512, 16384, NCCL),
    ],
)
def test_boundaries_are_exact(rows, row_bytes, expected):
    assert TABLE.choose(OP, rows, row_bytes) == expected


def test_between_row_sizes_the_nearer_answers_for_the_same_bytes():
    middle = 8192 * 2**0.5  # on a log scale
    assert TABLE.choose(OP, 100, int(middle) - 16) == RING
    assert TABLE.choose(OP, 100, int(middle) + 16) == WIDE
    assert TABLE.choose(OP, 15, 4096) == SPLIT and TABLE.choose(OP, 16, 4096) == RING
    assert TABLE.choose(OP, 1, 32768) == SPLIT and TABLE.choose(OP, 2, 32768) == WIDE
    assert TABLE.choose(OP, 1, 16) == SPLIT
    assert TABLE.choose(OP, 1, 1 << 30) == NCCL


@pytest.mark.parametrize("row_bytes", [2, 100, 5760, 8192, 10240, 12000, 16384, 28672, 65536])
def test_more_rows_never_go_back(row_bytes):
    order = [SPLIT, RING, WIDE, NCCL]
    found = [order.index(TABLE.choose(OP, rows, row_bytes)) for rows in range(1, 3000)]
    assert found == sorted(found)


@pytest.mark.parametrize(("message_bytes", "expected"), [(2, RING), (4096, RING), ((1 << 20) - 2, RING), (1 << 20, NCCL)])
def test_plain_all_reduce_goes_by_bytes(message_bytes, expected):
    """The dispatcher asks for one row of all elements; any other way to cut the message is the same."""
    assert TABLE.choose("all_reduce", 1, message_bytes) == expected
    assert TABLE.choose("all_reduce", message_bytes // 2, 2) == expected
    assert TABLE.choose("all_reduce", 1, 1 << 40) == NCCL


def test_an_operation_that_is_not_there():
    assert TABLE.choose("other", 1, 8192) is None
    assert Table(MACHINE, {OP: {}}, {}).choose(OP, 1, 8192) is None
    assert TABLE.candidates("other") == ()


def test_candidates():
    assert TABLE.candidates(OP) == ("tpfuse_split", "tpfuse_ring", "nccl")
    assert TABLE.candidates("all_reduce") == ("tpfuse_ring", "nccl")


def test_replace_keeps_other_row_sizes():
    new = TABLE.replace({OP: {8192: ((1, NCCL),)}, "other": {2: ((1, RING),)}}, {"torch": "2.12.0"})
    assert new.ops[OP] == {8192: ((1, NCCL),), 16384: TABLE.ops[OP][16384]}
    assert new.ops["all_reduce"] == TABLE.ops["all_reduce"]
    assert new.ops["other"] == {2: ((1, RING),)}
    assert new.versions == {"torch": "2.12.0"} and new.machine == MACHINE


# -- sharded rows ------------------------------------------------------------------------------------------------------


def test_rows_are_sharded_from():
    """By the nearest hidden size, at the same rows, unless it is another kind of model."""
    whole, sharded = Choice(tables.WHOLE), Choice(tables.SHARDED)
    op, other = tables.SEQUENCE_PARALLEL.values()
    ops = {
        op: {8192: ((1, whole), (256, sharded)), 16384: ((1, whole),), 1024: ((1, sharded),)},
        other: {8192: ((1, whole), (64, sharded), (128, whole), (512, sharded))},
    }
    table = tables.parse(Table(MACHINE, ops, {}).to_json(), "here")
    assert table.ops == ops
    assert table.sharded_from(op, 8192) == table.sharded_from(op, 11000) == (256, 8192)
    assert table.sharded_from(op, 12000) == table.sharded_from(op, 65536) == (float("inf"), 16384)
    assert table.sharded_from(op, 256) == (1, 1024)
    assert table.sharded_from(op, 65537) is None and table.sharded_from(op, 255) is None
    assert table.sharded_from(other, 8192) == (512, 8192)
    assert TABLE.sharded_from(op, 8192) is None


# -- GEMMs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, NCCL), (255, NCCL), (256, SMALL), (4095, SMALL), (4096, LARGE), (1 << 20, LARGE)]
)
def test_gemms_go_by_rows(rows, expected):
    assert TABLE.choose_matmul(MATMUL, rows, 4096, 7168) == expected


def test_the_nearest_gemm_answers_at_the_same_rows():
    assert TABLE.choose_matmul(MATMUL, 300, 5120, 9000) == SMALL
    assert TABLE.choose_matmul(MATMUL, 300, 8192, 9000) == LARGE
    assert TABLE.choose_matmul(MATMUL, 300, 4096, 14000) == SMALL  # by both numbers: each is 2 times as large there
    assert TABLE.choose_matmul(MATMUL, 300, 4097, 14336) == LARGE
    assert TABLE.choose_matmul(MATMUL, 300, 8192, 7168) == SMALL  # as near to both: the smaller


@pytest.mark.parametrize(
    ("columns", "inner", "expected"),
    [
        *((1024, 7168, SMALL), (1023, 7168, None), (4096, 1792, SMALL), (4096, 1791, None)),
        *((32768, 57344, LARGE), (32769, 57344, None), (32768, 57345, None), (8, 1 << 20, None)),
    ],
)
def test_a_gemm_of_another_kind_is_not_known(columns, inner, expected):
    """At most four times as large or small, in both."""
    assert TABLE.choose_matmul(MATMUL, 300, columns, inner) == expected


def test_sizes_of_another_kind_do_not_answer():
    assert TABLE.choose(MATMUL, 1, 8192) is None
    assert TABLE.choose_matmul(OP, 1, 4096, 4096) is None
    assert TABLE.choose_matmul("other", 1, 4096, 4096) is None
    mixed = Table(MACHINE, {OP: {8192: ((1, RING),), (8192, 8192): ((1, SMALL),)}}, {})
    assert mixed.choose(OP, 1, 8192) == RING and mixed.choose_matmul(OP, 1, 8192, 8192) == SMALL
    assert tables.parse(mixed.to_json(), "here") == mixed


def test_choices():
    assert Choice("tpfuse", pace=0.5, lead=None) == Choice("tpfuse", lead=None, pace=0.5) != Choice("tpfuse")
    assert str(SMALL) == "tpfuse columns=128 lead=None pace=0.5" and str(NCCL) == "nccl"
    assert SMALL.get("columns") == 128 and SMALL.get("lead") is None is NCCL.get("columns")
    assert len({SMALL, LARGE, Choice("tpfuse", columns=128, lead=None, pace=0.5)}) == 2


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_the_file():
    listed = json.loads(TABLE.to_json())["ops"]
    assert listed[MATMUL]["4096x7168"][1] == [256, "tpfuse", {"columns": 128, "lead": None, "pace": 0.5}]
    assert listed[OP]["8192"][1:] == [[8, "tpfuse_ring", {"blocks": 264, "warps": 8}], [1024, "nccl", {}]]


def test_round_trip():
    again = tables.parse(TABLE.to_json(), "here")
    assert again == TABLE
    assert again.to_json() == TABLE.to_json()


def test_digest_is_of_the_choices():
    shuffled = Table(MACHINE, {op: dict(reversed(by.items())) for op, by in reversed(TABLE.ops.items())}, {"torch": "9"})
    assert shuffled.digest == TABLE.digest == tables.parse(TABLE.to_json(), "here").digest
    for start, choice in ((9, RING), (8, Choice("tpfuse_ring", warps=8, blocks=264, registers=64))):
        ops = {**TABLE.ops, OP: {**TABLE.ops[OP], 8192: ((1, SPLIT), (start, choice), (1024, NCCL))}}
        assert Table(MACHINE, ops, TABLE.versions).digest != TABLE.digest


def broken(change):
    document = json.loads(TABLE.to_json())
    change(document)
    return json.dumps(document)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(document):
        for step in path:
            document = document[step]
        document[last] = value

    return broken(change)


def entries(*listed):
    return put("ops", OP, "8192", [[*start, {}] if len(start) == 2 else start for start in listed])


BROKEN = {
    "empty": "",
    "half": TABLE.to_json()[: len(TABLE.to_json()) // 2],
    "no JSON": "warps: 8",
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "deep": "[" * 100_000,
    "no format": broken(lambda d: d.pop("format")),
    "no machine": broken(lambda d: d.pop("machine")),
    "no ops": broken(lambda d: d.pop("ops")),
    "no versions": broken(lambda d: d.pop("versions")),
    "no link": broken(lambda d: d["machine"].pop("link")),
    "world is a text": put("machine", "world", "2"),
    "gpu is a number": put("machine", "gpu", 1),
    "ops is a list": put("ops", []),
    "op is a list": put("ops", OP, []),
    "row size is a text": put("ops", OP, "wide", [[1, "nccl", {}]]),
    "row size is zero": put("ops", OP, "0", [[1, "nccl", {}]]),
    "row size is negative": put("ops", OP, "-8192", [[1, "nccl", {}]]),
    "row size twice": put("ops", OP, "08192", [[1, "nccl", {}]]),
    "half a matrix": put("ops", MATMUL, "4096x", [[1, "nccl", {}]]),
    "a matrix without columns": put("ops", MATMUL, "0x4096", [[1, "nccl", {}]]),
    "a matrix of three": put("ops", MATMUL, "2x2x2", [[1, "nccl", {}]]),
    "a matrix twice": put("ops", MATMUL, "4096x07168", [[1, "nccl", {}]]),
    "no entries": entries(),
    "not from 1": entries([2, "nccl"]),
    "descending": entries([1, "nccl"], [8, "tpfuse_ring"], [4, "nccl"]),
    "twice the same": entries([1, "nccl"], [1, "tpfuse_ring"]),
    "rows are a fraction": entries([1, "nccl"], [1.5, "tpfuse_ring"]),
    "rows are true": entries([True, "nccl"]),
    "no name": entries([1]),
    "name is a number": entries([1, 8]),
    "no options": put("ops", OP, "8192", [[1, "nccl"]]),
    "options are a list": entries([1, "tpfuse_ring", [8, 264]]),
    "warps are negative": entries([1, "tpfuse_ring", {"warps": -1}]),
    "warps are a text": entries([1, "tpfuse_ring", {"warps": "8"}]),
    "warps are true": entries([1, "tpfuse_ring", {"warps": True}]),
    "pace is no number": entries([1, "tpfuse", {"pace": float("nan")}]),
    "pace is infinite": entries([1, "tpfuse", {"pace": float("inf")}]),
    "an option that is none": entries([1, "tpfuse_ring", {"candidate": 1}]),
    "as format 1 had it": entries([1, "tpfuse_ring", 8, 264, None]),
    "too long": entries([1, "tpfuse_ring", {}, {}]),
    "versions are a list": put("versions", []),
    "a version is a number": put("versions", "torch", 2),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_table_is_refused(text):
    with pytest.raises(ConfigError, match=r"^/some/file\.json is not a table of tpfuse \(.*run tpfuse tune$"):
        tables.parse(text, "/some/file.json")


@pytest.mark.parametrize("found", [0, 1, 3, "2", None])
def test_another_format_is_refused(found):
    text = json.dumps({"format": found, "whatever": 1})  # nothing else need be as it is now
    with pytest.raises(ConfigError, match=rf"^/a\.json: format {found!r}, this version .* reads 2; run tpfuse tune$"):
        tables.parse(text, "/a.json")


# -- files -------------------------------------------------------------------------------------------------------------


def test_save_and_find(cache):
    assert tables.find(MACHINE) == (None, "no table for 2 x NVIDIA H200 (nvlink): run tpfuse tune")
    path = tables.save(TABLE)
    assert path == cache / "NVIDIA_H200-nvlink-x2.json" == tables.tuned_path(MACHINE)
    assert tables.find(MACHINE) == (TABLE, f"tuned: {path}")
    assert [p.name for p in cache.iterdir()] == [path.name]
    elsewhere = cache.parent / "new" / "folder" / "table.json"
    assert tables.save(TABLE, elsewhere) == elsewhere
    assert tables.load(elsewhere, MACHINE) == TABLE


def test_machines_have_files_of_their_own():
    machines = [MACHINE, dataclasses.replace(MACHINE, world=4), dataclasses.replace(MACHINE, link="pcie")]
    assert len({tables.file_name(m) for m in machines}) == 3
    assert tables.file_name(Machine("A/../b ü.json", "nvlink", 2)) == "A____b___json-nvlink-x2.json"


@pytest.mark.parametrize("text", [BROKEN["half"], BROKEN["empty"], put("format", 1), put("machine", "world", 4)])
def test_a_cache_that_cannot_be_used_is_left_aside_and_told(cache, text):
    path = tables.save(TABLE)
    path.write_text(text)
    table, source = tables.find(MACHINE)
    assert table is None
    assert source.startswith(str(path)) and "run tpfuse tune; no table for" in source
    shipped = cache.parent / "shipped"
    shipped.mkdir()
    tables.shipped.cache_clear()
    (shipped / path.name).write_text(TABLE.to_json())
    table, source = tables.find(MACHINE)
    assert table == TABLE
    assert source.startswith(str(path)) and source.endswith("run tpfuse tune; shipped with tpfuse")


def test_a_cache_that_cannot_be_read(cache, monkeypatch):
    path = tables.save(TABLE)
    path.write_bytes(b"\xff\xfe\x00")
    assert tables.find(MACHINE)[1].startswith(f"{path} is not a table of tpfuse (it is no text); run tpfuse tune")
    path.unlink()
    path.mkdir()
    assert tables.find(MACHINE)[1].startswith(f"{path} cannot be read (Is a directory)")
    monkeypatch.setenv("TPFUSE_CACHE_DIR", "/dev/null")
    assert "cannot be read (Not a directory)" in tables.find(MACHINE)[1]


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TPFUSE_CACHE_DIR")
    monkeypatch.setattr(pathlib.Path, "home", no_home)
    table, source = tables.find(MACHINE)
    assert table is None and source.startswith("there is no home folder to keep tuned tables in: set TPFUSE_CACHE_DIR; ")


def test_a_broken_shipped_table_is_told(cache):
    (cache.parent / "shipped").mkdir()
    (cache.parent / "shipped" / tables.file_name(MACHINE)).write_text(BROKEN["half"])
    table, source = tables.find(MACHINE)
    assert table is None and "is not a table of tpfuse" in source


def test_save_is_atomic(cache, monkeypatch):
    """A reader sees the old table or the new one; a failure leaves the old one and nothing else."""
    path = tables.save(TABLE)
    new = Table(MACHINE, {OP: {8192: ((1, NCCL),)}}, {})
    seen = []
    replace = pathlib.Path.replace

    def watched(temporary, target):
        seen.append((tables.parse(temporary.read_text(), "temporary"), tables.load(path, MACHINE)))
        return replace(temporary, target)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", watched)
    with monkeypatch.context() as context:
        context.setattr(tables.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            tables.save(new)
    assert not seen and tables.load(path, MACHINE) == TABLE
    assert list(cache.iterdir()) == [path]
    tables.save(new)
    assert seen == [(new, TABLE)] and tables.load(path, MACHINE) == new
    assert list(cache.iterdir()) == [path]


def test_save_where_nothing_can_be(monkeypatch):
    monkeypatch.setenv("TPFUSE_CACHE_DIR", "/dev/null/folder")
    with pytest.raises(OSError):
        tables.save(TABLE)


def test_tables_that_ship_are_tables():
    """Each is valid, is found under the name of its machine, and is in the package."""
    folder = pathlib.Path(tables.__file__).parent
    for path in folder.glob("*.json"):
        table = tables.parse(path.read_text(encoding="utf-8"), path.name)
        assert tables.file_name(table.machine) == path.name
        assert {"torch", "triton", "tpfuse"} <= set(table.versions)
    project = folder.parent.parent / "pyproject.toml"
    if project.exists():
        assert '"tpfuse.tables" = ["*.json"]' in project.read_text()
