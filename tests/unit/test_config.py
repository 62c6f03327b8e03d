"""FusionConfig: where it comes from, what it refuses, and what it comes to."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import pickle

import pytest

import tpfuse
from tpfuse.config import FUSION_LEVELS, TUNED_FUSION, FusionConfig
from tpfuse.errors import ConfigError, TpfuseError
from tpfuse.graph import pipeline

FUSIONS = (
    "fuse_allreduce_rms",
    "enable_sp",
    "fuse_gemm_comms",
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_rope_kvcache",
    "enable_qk_norm_rope_fusion",
    "fuse_act_padding",
    "fuse_mla_dual_rms_norm",
)
ALL_CAN = dict[str, str]()


def on(config, unavailable=ALL_CAN):
    return {name for name, fusion in config.resolve(unavailable).items() if fusion.on}


# -- the public fields -------------------------------------------------------------------------------------------------


def test_fields_and_defaults():
    """Others script against these names."""
    fields = {f.name: f.default for f in dataclasses.fields(tpfuse.FusionConfig)}
    expected = {
        "optimization_level": 2,
        **dict.fromkeys(FUSIONS),
        "sp_min_token_num": None,
        "fi_allreduce_fusion_max_size_mb": None,
        "rope_kvcache_fusion_max_token_num": 256,
    }
    assert expected.items() <= fields.items()
    assert set(FUSION_LEVELS) == set(FUSIONS)


def test_frozen():
    config = FusionConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.enable_sp = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        del config.enable_sp


def test_keyword_only():
    with pytest.raises(ConfigError, match="keyword"):
        FusionConfig(2)


def test_equal_configurations_are_one():
    assert FusionConfig(optimization_level="O2") == FusionConfig() != FusionConfig(enable_sp=False)
    assert len({FusionConfig(), FusionConfig(optimization_level="2"), FusionConfig(token_boundaries=[])}) == 1


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies(again):
    config = FusionConfig(optimization_level=3, enable_sp=False, token_boundaries=(64, 256), sp_min_token_num=None)
    assert again(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        again(config).enable_sp = True


def test_replace_checks_again():
    assert dataclasses.replace(FusionConfig(), optimization_level="O1").optimization_level == 1
    with pytest.raises(ConfigError):
        dataclasses.replace(FusionConfig(), optimization_level=9)


# -- levels ------------------------------------------------------------------------------------------------------------


def test_levels_only_ever_add():
    by_level = [on(FusionConfig(optimization_level=level)) for level in range(4)]
    assert by_level[0] == set()
    assert by_level[0] <= by_level[1] <= by_level[2] <= by_level[3] == set(FUSIONS)
    assert "fuse_allreduce_rms" in by_level[1]
    assert not {"enable_sp", "fuse_gemm_comms"} & by_level[1], "they change memory use and structure"
    assert by_level[2] < by_level[3]


@pytest.mark.parametrize("level", range(4))
def test_level_spellings(level):
    for spelling in (level, f"O{level}", f"o{level}", str(level), f" O{level} "):
        assert FusionConfig(optimization_level=spelling).optimization_level == level


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("name", FUSIONS)
def test_explicit_value_wins(name, level):
    yes = FusionConfig(optimization_level=level, **{name: True}).resolve({})[name]
    no = FusionConfig(optimization_level=level, **{name: False}).resolve({})[name]
    none = FusionConfig(optimization_level=level, **{name: None}).resolve({})[name]
    assert (yes.on, yes.explicit, yes.reason) == (True, True, "")
    assert (no.on, no.explicit) == (False, True) and name in no.reason
    assert (none.on, none.explicit) == (level >= FUSION_LEVELS[name], False)
    assert none.on or f"optimization_level={level}" in none.reason


# -- what cannot be honoured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSIONS)
def test_unavailable_by_level_is_off_with_its_reason(name):
    resolved = FusionConfig(optimization_level=3).resolve({name: "the moon is full"})
    assert not resolved[name].on and not resolved[name].explicit and resolved[name].reason == "the moon is full"
    assert all(fusion.on for other, fusion in resolved.items() if other != name)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", FUSIONS)
def test_unavailable_by_name_is_an_error(name, level):
    config = FusionConfig(optimization_level=level, **{name: True})
    with pytest.raises(ConfigError, match=f"{name}.*the moon is full"):
        config.resolve({name: "the moon is full"})


@pytest.mark.parametrize("name", FUSIONS)
def test_unavailable_and_unwanted_is_fine(name):
    assert not FusionConfig(**{name: False}).resolve({name: "the moon is full"})[name].on


TUNED = {
    "sp_min_token_num": 64,
    "fi_allreduce_fusion_max_size_mb": 1.5,
    "rope_kvcache_fusion_max_token_num": 64,
    "workspace_mb": 32,
    "peer_timeout_s": 5,
}


def test_every_tuned_field_is_known():
    assert set(TUNED_FUSION) == set(TUNED) and set(TUNED_FUSION.values()) <= set(FUSIONS)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("missing", ["the field", "its fusion"])
def test_tuned_field_that_cannot_be_honoured(name, missing):
    """Never echoed as set and silently without effect."""
    config = FusionConfig(**{name: TUNED[name]})
    unavailable = {name if missing == "the field" else TUNED_FUSION[name]: "the moon is full"}
    with pytest.raises(ConfigError, match=f"{name}={TUNED[name]}.*the moon is full"):
        config.resolve(unavailable)
    config.resolve({})
    FusionConfig().resolve(unavailable)


def test_this_version():
    """What this version has no pass for is an error by name, and off by level with a reason."""
    unavailable = pipeline.unavailable()
    resolved = FusionConfig(optimization_level=3).resolve(unavailable)
    assert {name for name, fusion in resolved.items() if fusion.on} == set(pipeline.OPS)
    assert all(fusion.on or fusion.reason for fusion in resolved.values())
    for name in set(FUSIONS) - set(pipeline.OPS):
        with pytest.raises(ConfigError, match=f"{name}=True.*version"):
            FusionConfig(**{name: True}).resolve(unavailable)
    for name, value in TUNED.items():
        if TUNED_FUSION[name] not in pipeline.OPS or name in unavailable:
            with pytest.raises(ConfigError, match=f"{name}={value}.*version"):
                FusionConfig(**{name: value}).resolve(unavailable)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("fuse_all_reduce_rms", "fuse_allreduce_rms"),
        ("fuse_allreduce_rmsnorm", "fuse_allreduce_rms"),
        ("enabel_sp", "enable_sp"),
        ("optimisation_level", "optimization_level"),
        ("fuse_gemm_comm", "fuse_gemm_comms"),
        ("sp_min_tokens", "sp_min_token_num"),
        ("fi_allreduce_fusion_max_size", "fi_allreduce_fusion_max_size_mb"),
        ("FUSE_NORM_QUANT", "fuse_norm_quant"),
    ],
)
def test_unknown_field_names_the_nearest(wrong, near):
    for make in (
        lambda: FusionConfig(**{wrong: None}),
        lambda: FusionConfig.load({wrong: None}),
        lambda: FusionConfig.load([f"{wrong}=1"]),
        lambda: FusionConfig.load(f"{wrong}=1"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert repr(wrong) in str(caught.value) and repr(near) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"optimization_level": 4}, "3"),
        ({"optimization_level": -1}, "0"),
        ({"optimization_level": "O7"}, "3"),
        ({"optimization_level": "fast"}, "2"),
        ({"optimization_level": None}, "2"),
        ({"optimization_level": True}, "[0-3]"),
        ({"optimization_level": 1.5}, "[0-3]"),
        ({"fuse_allreduce_rms": 1}, "True"),
        ({"fuse_allreduce_rms": 0}, "False"),
        ({"fuse_allreduce_rms": "on"}, "True"),
        ({"fuse_allreduce_rms": "off"}, "False"),
        ({"sp_min_token_num": -1}, "0"),
        ({"sp_min_token_num": 63.5}, "6[34]"),
        ({"sp_min_token_num": "64"}, "64"),
        ({"fi_allreduce_fusion_max_size_mb": -0.5}, "0"),
        ({"workspace_mb": float("inf")}, "64"),
        ({"rope_kvcache_fusion_max_token_num": -2}, "0"),
        ({"rope_kvcache_fusion_max_token_num": None}, "256"),
        ({"token_boundaries": (256, 64)}, r"\(64, 256\)"),
        ({"token_boundaries": (64, 64)}, r"\(64,\)"),
        ({"token_boundaries": (0, 64)}, r"\(64,\)|\(1, 64\)"),
        ({"token_boundaries": 64}, r"\(64,\)"),
    ],
    ids=str,
)
def test_bad_value_names_field_value_and_nearest(fields, near):
    ((name, value),) = fields.items()
    with pytest.raises(ConfigError, match=f"nearest.*{near}") as caught:
        FusionConfig(**fields)
    assert name in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize("item", ["fuse_allreduce_rms=treu", "optimization_level=O9", "sp_min_token_num=-3"])
def test_bad_string_names_the_nearest(item):
    with pytest.raises(ConfigError, match="nearest") as caught:
        FusionConfig.load([item])
    assert item.split("=")[0] in str(caught.value)


@pytest.mark.parametrize("name", ["sp_min_token_num", "fi_allreduce_fusion_max_size_mb", "token_boundaries"])
def test_no_number(name):
    with pytest.raises(ConfigError, match=f"{name}.*'many'"):
        FusionConfig.load([f"{name}=many"])


def test_not_a_number():
    """NaN compares false with everything: as a limit it would switch a kernel off without a word."""
    with pytest.raises(ConfigError, match="fi_allreduce_fusion_max_size_mb"):
        FusionConfig(fi_allreduce_fusion_max_size_mb=float("nan"))


def test_errors_are_value_errors():
    with pytest.raises(ValueError) as caught:
        FusionConfig(optimization_level=4)
    assert isinstance(caught.value, TpfuseError)


# -- where it comes from -----------------------------------------------------------------------------------------------

SAMPLE = FusionConfig(optimization_level=1, fuse_allreduce_rms=False, token_boundaries=(64, 256), token_count_from="ids")


def test_load_nothing_and_itself():
    assert FusionConfig.load(None) == FusionConfig()
    assert FusionConfig.load(SAMPLE) is SAMPLE


def test_dict_round_trip():
    assert FusionConfig.load(SAMPLE.to_dict()) == SAMPLE
    assert FusionConfig.load({}) == FusionConfig()
    json.dumps(SAMPLE.to_dict())


@pytest.mark.parametrize("kind", [str, pathlib.Path], ids=["str", "Path"])
def test_json_file(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SAMPLE.to_dict()))
    assert FusionConfig.load(kind(path)) == SAMPLE
    path.write_text('{"optimization_level": "O3", "enable_sp": null, "token_boundaries": [8, 16]}')
    assert FusionConfig.load(kind(path)) == FusionConfig(optimization_level=3, token_boundaries=(8, 16))


def test_json_file_with_an_equals_sign_in_its_path(tmp_path):
    """Run folders are often named like lr=0.1."""
    folder = tmp_path / "level=1"
    folder.mkdir()
    (folder / "config.json").write_text('{"optimization_level": 1}')
    assert FusionConfig.load(folder / "config.json").optimization_level == 1
    assert FusionConfig.load(str(folder / "config.json")).optimization_level == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not valid JSON"),
        ("[1]", "one JSON object"),
        ('{"enabel_sp": true}', "enable_sp"),
        ('{"enable_sp": "on"}', "enable_sp"),
        ("\xff\xfe", "not valid JSON"),
    ],
)
def test_bad_json_file(tmp_path, text, what):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=what):
        FusionConfig.load(str(path))


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        FusionConfig.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot read"):
        FusionConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["fuse_allreduce_rms=off"], {"fuse_allreduce_rms": False}),
        (["fuse_allreduce_rms=True", "optimization_level=O0"], {"fuse_allreduce_rms": True, "optimization_level": 0}),
        (["enable_sp=none", "enable_qk_norm_rope_fusion=No"], {"enable_qk_norm_rope_fusion": False}),
        (("sp_min_token_num=64",), {"sp_min_token_num": 64}),
        (["sp_min_token_num=auto", "fi_allreduce_fusion_max_size_mb=0.5"], {"fi_allreduce_fusion_max_size_mb": 0.5}),
        (["token_boundaries=64,256"], {"token_boundaries": (64, 256)}),
        (["token_boundaries="], {}),
        (["token_count_from=ids"], {"token_count_from": "ids"}),
        ([" optimization_level = 3 "], {"optimization_level": 3}),
        ("optimization_level=3", {"optimization_level": 3}),
        ("optimization_level=3 enable_sp=0", {"optimization_level": 3, "enable_sp": False}),
        ("optimization_level=3,enable_sp=0", {"optimization_level": 3, "enable_sp": False}),
        ("token_boundaries=64,256", {"token_boundaries": (64, 256)}),
        (
            "optimization_level=1,token_boundaries=64,256,enable_sp=off",
            {"optimization_level": 1, "token_boundaries": (64, 256), "enable_sp": False},
        ),
    ],
    ids=str,
)
def test_strings(items, expected):
    assert FusionConfig.load(items) == FusionConfig(**expected)


@pytest.mark.parametrize("items", [["fuse_allreduce_rms"], ["=1"], [""]], ids=str)
def test_strings_of_another_form(items):
    with pytest.raises(ConfigError):
        FusionConfig.load(items)


@pytest.mark.parametrize("source", [3, 2.0, ..., [1, 2]], ids=str)
def test_other_sources(source):
    with pytest.raises(ConfigError):
        FusionConfig.load(source)


@pytest.mark.parametrize("text", ["true", "1", "on", "yes", "TRUE"])
def test_disable_variable(monkeypatch, text):
    from tpfuse.config import DISABLE_VARIABLE, is_disabled

    assert DISABLE_VARIABLE == "TPFUSE_DISABLE"
    monkeypatch.setenv(DISABLE_VARIABLE, text)
    assert is_disabled()
    for other in ("", "0", "false", "off"):
        monkeypatch.setenv(DISABLE_VARIABLE, other)
        assert not is_disabled()
    monkeypatch.delenv(DISABLE_VARIABLE)
    assert not is_disabled()
