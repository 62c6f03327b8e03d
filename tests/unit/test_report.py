"""What a report counts, and how it is written down."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tpfuse.config import FusionConfig
from tpfuse.report import Recorder, Report, Site

FUSION = "fuse_allreduce_rms"


def site(where, outcome="fused", reason="", **kwargs):
    kwargs.setdefault("op", "all_reduce")
    kwargs.setdefault("group", "tp")
    return Site(kwargs.pop("fusion", FUSION), outcome, reason, where, **kwargs)


def recorder(*sites):
    made = Recorder(FusionConfig().resolve({}))
    for each in sites:
        made.site(each)
    return made


def test_count_is_of_places():
    """Neither variants nor kernels nor recompilations of one place add up."""
    made = recorder(
        site("layers.0.o_proj", variant="rows<256", kernel="one_shot"),
        site("layers.0.o_proj", variant="rows>=256", kernel="two_shot"),
        site("layers.1.o_proj", variant="rows<256", kernel="one_shot"),
        site("layers.1.o_proj", "skipped", "world size 1", variant="rows>=256"),
        site("layers.2.o_proj", "merged", "into another"),
        site("layers.3.o_proj", fusion="enable_sp"),
    )
    for _ in range(3):
        made.site(site("layers.0.o_proj", variant="rows<256", kernel="one_shot"))
    report = made.report()
    assert report.count(FUSION) == 2
    assert report.count(FUSION, "merged") == 1
    assert report.count(FUSION, "skipped") == 1
    assert report.count("enable_sp") == 1
    assert report.count("fuse_norm_quant") == 0
    assert len(report.sites) == 6


def test_sites_in_order_of_first_appearance():
    names = ["embed", "layers.10", "layers.2", "layers.0", "norm"]
    made = recorder(*(site(name) for name in names))
    made.site(site("layers.2"))
    made.site(site("embed", variant="rows<8"))
    assert [s.where for s in made.report().sites] == [*names, "embed"]


def test_notes_once_each_in_order():
    made = recorder()
    for text in ("b", "a", "b"):
        made.note(text)
    assert made.report().notes == ("b", "a")


def test_report_is_a_snapshot():
    made = recorder(site("a"))
    before = made.report()
    made.site(site("b"))
    made.note("later")
    made.graphs += 1
    assert len(before.sites) == 1 and before.notes == () and before.graphs == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.graphs = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.sites[0].where = "c"


def _full():
    made = recorder(
        site("layers.0.o_proj", kernel="reference"),
        site("layers.0.mlp", "skipped", "no norm follows: it goes to mm.default"),
        site("norm", "skipped", "no all-reduce reaches this norm", op="rms_norm", group=""),
    )
    made.note("group 'tp' has one rank: nothing to fuse")
    made.graphs, made.pass_seconds = 3, 0.25
    return made.report()


def test_json_round_trip():
    """From its JSON text the very same report can be made again."""
    report = _full()
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    from tpfuse.config import Resolved

    again = Report(
        sites=tuple(Site(**s) for s in data["sites"]),
        notes=tuple(data["notes"]),
        fusions={name: Resolved(**f) for name, f in data["fusions"].items()},
        graphs=data["graphs"],
        pass_seconds=data["pass_seconds"],
        compile_seconds=data["compile_seconds"],
    )
    assert again == report and str(again) == str(report)
    assert set(data["sites"][0]) == {"fusion", "outcome", "reason", "where", "op", "group", "kernel", "variant"}


def test_json_on_one_line():
    assert "\n" not in _full().to_json(indent=None)


def test_to_dict_is_a_copy():
    report = _full()
    report.to_dict()["fusions"].clear()
    assert report.fusions


def test_table():
    """One row for all layers of a kind; totals of places; what is off, with its reason."""
    made = Recorder(FusionConfig(enable_sp=False).resolve({"fuse_norm_quant": "not in this version"}))
    for layer in range(12):
        made.site(site(f"model.layers.{layer}.self_attn.o_proj", kernel="reference"))
        made.site(site(f"model.layers.{layer}.mlp.shared", "merged", f"into model.layers.{layer}.mlp"))
        made.site(site(f"model.layers.{layer}.mlp", kernel="reference"))
    made.site(site("model.embed_tokens", "skipped", "no norm follows: it goes to mm"))
    made.site(site("model.norm", "skipped", "no all-reduce reaches this norm", op="rms_norm", group=""))
    made.note("a group has one rank")
    made.graphs, made.pass_seconds = 2, 1.234
    made.compile_seconds = {"rows<64": 3.14, "rows>=64": 15.9}
    text = str(made.report())
    lines = text.splitlines()
    assert lines[0].split() == ["where", "op", "outcome", "kernel", "or", "reason", "group", "rows", "sites"]
    assert set(lines[1]) == {"-", " "}
    rows = {line.split()[0]: line for line in lines[2:7]}
    assert set(rows) == {
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.shared",
        "model.layers.*.mlp",
        "model.embed_tokens",
        "model.norm",
    }
    assert rows["model.layers.*.mlp"].split() == [
        "model.layers.*.mlp",
        "all_reduce",
        "fused",
        "reference",
        "tp",
        "all",
        "12",
    ]
    assert "into model.layers.*.mlp" in rows["model.layers.*.mlp.shared"]
    assert "all-reduces: 24 fused, 12 merged, 1 left; 2 graph(s), 1.23 s" in text
    assert text.count("; compiled: rows<64 3.1 s, rows>=64 15.9 s") == 1
    assert "a group has one rank" in text
    assert "enable_sp=False: enable_sp" in text and "not in this version: fuse_norm_quant" in text


def test_columns_line_up():
    lines = str(_full()).splitlines()
    starts = [i for i, c in enumerate(lines[1]) if c == "-" and (i == 0 or lines[1][i - 1] == " ")]
    for row in lines[2:5]:
        for start in starts[1:]:
            assert row[start - 2 : start].strip() == "", row


def test_rows_apart():
    """Another outcome, reason, group or range of rows is another row."""
    made = recorder(
        site("layers.0", kernel="reference"),
        site("layers.1", kernel="reference", group="other"),
        site("layers.2", "skipped", "dtype torch.float64"),
        site("layers.3", "skipped", "world size 1"),
        site("layers.4", kernel="reference", variant="rows<8"),
    )
    rows = str(made.report()).splitlines()[2:7]
    assert all(row.split()[0] == "layers.*" and row.endswith("  1") for row in rows) and len(set(rows)) == 5


def test_table_counts_a_place_once():
    """The last column counts places, as count() does."""
    made = recorder(*(site("layers.0", variant=v, kernel=k) for v, k in (("rows<8", "a"), ("rows>=8", "b"))))
    made.site(site("layers.0", variant="rows<8", kernel="a"))
    text = str(made.report())
    assert "all-reduces: 1 fused, 0 merged, 0 left" in text


def test_nothing_seen():
    text = str(recorder().report())
    assert text.splitlines()[0].startswith("no all-reduce seen: no call was compiled yet")
    assert "all-reduces: 0 fused, 0 merged, 0 left; 0 graph(s)" in text


def test_numbers_that_are_no_layer_stay():
    """conv2d or file:line keep their digits."""
    made = recorder(site("mlp2.fc1"), site("model.py:12"), site("model.py:13"))
    wheres = [line.split()[0] for line in str(made.report()).splitlines()[2:5]]
    assert wheres == ["mlp2.fc1", "model.py:12", "model.py:13"]
