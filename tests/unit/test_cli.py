"""The console script: commands, and how it starts ranks."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tpfuse import cli
from tpfuse.tuner import job
from tpfuse.version import __version__


@pytest.fixture
def started(monkeypatch):
    """What would have been given to torchrun."""
    calls = []
    monkeypatch.setattr(run, "main", calls.append)
    return calls


def devices(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_help_and_version(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    assert capsys.readouterr().out == cli.USAGE * 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tpfuse {__version__}\n"


def test_unknown_command(capsys, started):
    assert cli.main(["train"]) == 2
    assert "unknown command 'train'; there are 'demo', 'tune', 'bench'" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize("command", ["demo", "tune"])
def test_help_of_a_command(capsys, command):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: tpfuse {command}") and "--nproc-per-node" in told


def test_demo_starts_its_ranks(started):
    assert cli.main(["demo", "--nproc-per-node", "3", "--layers", "1"]) == 0
    assert started == [["--standalone", "--nproc-per-node", "3", "-m", "tpfuse.demo", "--layers", "1"]]


def test_demo_has_a_rank_for_each_place_of_its_mesh(started):
    assert cli.main(["demo", "--mesh", "tp2xdp2"]) == 0
    assert cli.main(["demo", "--mesh", "pp3xTP2", "--nproc-per-node", "1"]) == 0  # several machines may have the others
    assert started == [
        ["--standalone", "--nproc-per-node", "4", "-m", "tpfuse.demo", "--mesh", "tp2xdp2"],
        ["--standalone", "--nproc-per-node", "1", "-m", "tpfuse.demo", "--mesh", "pp3xTP2"],
    ]


@pytest.mark.parametrize("mesh", ["", "2", "tp", "tp0", "tp2xep2", "tp2xtp2", "tp2 x dp2", "tp2xdp"])
def test_no_mesh(capsys, started, mesh):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--mesh", mesh])
    assert caught.value.code == 2 and not started
    assert f"must be like tp2, tp2xdp2 or tp2xpp2, got {mesh!r}" in capsys.readouterr().err


def test_tune_starts_a_rank_per_gpu(monkeypatch, started):
    devices(monkeypatch, 4)
    assert cli.main(["tune", "--hidden", "64", "--fresh"]) == 0
    assert cli.main(["tune", "--nproc-per-node", "2"]) == 0
    assert started == [
        ["--standalone", "--nproc-per-node", "4", "-m", "tpfuse.tuner", "--hidden", "64", "--fresh"],
        ["--standalone", "--nproc-per-node", "2", "-m", "tpfuse.tuner"],
    ]


@pytest.mark.parametrize(
    ("count", "given", "told"),
    [
        (0, [], "there is no CUDA device, and nothing to choose between on the CPU"),
        (0, ["--nproc-per-node", "2"], "there is no CUDA device, and nothing to choose between on the CPU"),
        (1, [], "one rank has nothing to communicate: 2 or more are needed"),
        (8, ["--nproc-per-node", "1"], "one rank has nothing to communicate: 2 or more are needed"),
        (2, ["--nproc-per-node", "4"], "4 ranks need 4 CUDA devices, there are 2"),
    ],
)
def test_tune_where_nothing_can_be_tuned(monkeypatch, capsys, started, count, given, told):
    """One line and status 2, here and on ranks that torchrun has started."""
    devices(monkeypatch, count)
    assert cli.main(["tune", *given]) == 2
    assert capsys.readouterr().err == f"tpfuse tune: {told}\n"
    assert not started


def test_sharded_rows_are_tuned_on_cpu_ranks_too(monkeypatch, capsys, started):
    devices(monkeypatch, 0)
    asked = ["--sequence-parallel", "64x128"]
    assert cli.main(["tune", *asked]) == 0
    assert started == [["--standalone", "--nproc-per-node", "2", "-m", "tpfuse.tuner", *asked]]
    devices(monkeypatch, 2)
    assert cli.main(["tune", *asked, "--nproc-per-node", "4"]) == 2
    assert capsys.readouterr().err == "tpfuse tune: 4 ranks need 4 CUDA devices, there are 2\n"


def test_ranks_where_nothing_can_be_tuned(monkeypatch, capsys):
    devices(monkeypatch, 0)
    for rank in "01":
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert job.main([]) == 2
        assert ("no CUDA device" in capsys.readouterr().err) is (rank == "0")


def test_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start it with 'tpfuse tune' or 'torchrun"):
        job.main([])


def test_bad_arguments_start_nothing(monkeypatch, capsys, started):
    devices(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = (["tune", "--rows", "0"], ["tune", "--nproc-per-node", "0"], ["demo", "--layers", "0"])
    for given in (*wrong, ["demo", "--device", "cuda"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(given)
        assert caught.value.code == 2
    assert not started


def test_bench_runs_a_script_of_the_checkout(monkeypatch, capsys, started):
    devices(monkeypatch, 2)
    assert cli.main(["bench", "sweep_all_reduce", "--kilobytes", "1"]) == 0
    ((*launch, script, option, value),) = started
    assert launch == ["--standalone", "--nproc-per-node", "2"] and (option, value) == ("--kilobytes", "1")
    assert script.endswith("benchmarks/sweep_all_reduce.py")
    for name in cli.BENCHMARKS:
        assert pathlib.Path(script).with_name(f"{name}.py").exists()
    started.clear()
    assert cli.main(["bench", "sweep_all_reduce", "--nproc-per-node", "4"]) == 2
    assert cli.main(["bench", "families"]) == 2 and cli.main(["bench"]) == cli.main(["bench", "--help"]) == 0
    told = capsys.readouterr().err
    assert (
        "4 ranks need 4 CUDA devices, there are 2" in told
        and "no benchmark 'families'; there are sweep_all_reduce_rms_norm, " in told
    )
    assert not started


@pytest.mark.parametrize(("codes", "status"), [([1], 1), ([2, 2], 2), ([-9, 1], 1), ([-11], 1)])
def test_the_exit_status_is_that_of_a_rank(monkeypatch, codes, status):
    def fail(arguments):
        failures = {rank: type("Failure", (), {"exitcode": code})() for rank, code in enumerate(codes)}
        error = ChildFailedError.__new__(ChildFailedError)
        error.failures = failures
        raise error

    devices(monkeypatch, 2)
    monkeypatch.setattr(run, "main", fail)
    assert cli.main(["tune"]) == status
