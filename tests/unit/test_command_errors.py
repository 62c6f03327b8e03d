"""Bad command lines: status 2, a last line that says what is wrong, no traceback, and no rank is started."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch.distributed import run

from tpfuse import cli

#: The command line, a number standing for so many GPUs -> what the last line says.
CASES: dict[str, tuple[int, str]] = {
    "train": (2, "unknown command 'train'; there are 'demo', 'tune', 'bench'"),
    "demo --layers x": (0, "--layers: must be a whole number of at least 1, got 'x'"),
    "demo --layers 0": (0, "--layers: must be a whole number of at least 1, got '0'"),
    "demo --nproc-per-node 0": (0, "--nproc-per-node: must be a whole number of at least 1, got '0'"),
    "demo --set nope=1": (0, "--set: unknown field 'nope'; the nearest valid one is"),
    "demo --set fuse_attn_quant=on": (0, "--set: fuse_attn_quant=True cannot be honoured"),
    "demo --set x": (0, "--set: 'x' is not of the form key=value"),
    "demo --dtype int": (0, "--dtype: invalid choice: 'int' (choose from"),
    "demo --device cuda": (0, "--device cuda: there is no CUDA device"),
    "demo --family nope": (0, "--family: invalid choice: 'nope' (choose from"),
    "demo --model /nowhere": (0, "--model: no folder '/nowhere'"),
    "demo --model FOLDER --layers 1": (0, "a checkpoint has its own sizes: --layers cannot go with --model"),
    "demo --nope": (0, "unrecognized arguments: --nope"),
    "demo extra": (0, "unrecognized arguments: extra"),
    "tune --hidden x": (2, "--hidden: must be a number above 0, got 'x'"),
    "tune --rows -1": (2, "--rows: must be a number above 0, got '-1'"),
    "tune --seconds nan": (2, "--seconds: must be a number above 0, got 'nan'"),
    "tune --model FOLDER": (2, "config.json is not JSON"),
    "tune --model /nowhere": (2, "/nowhere/config.json: No such file or directory"),
    "tune --gemm 4x": (2, "--gemm: must be NxK, two numbers above 0, got '4x'"),
    "tune --ops nope": (2, "--ops: no operation 'nope'; there are all_reduce_rms_norm"),
    "tune --ops matmul_all_reduce": (2, "--ops matmul_all_reduce: --gemm says for which sizes"),
    "tune --dtype fp8": (2, "--dtype fp8: all-reduces are measured in bf16,fp16,fp32"),
    "tune --hidden 64 --model FOLDER": (2, "--model: not allowed with argument --hidden"),
    "tune --nproc-per-node x": (2, "--nproc-per-node: must be a number above 0, got 'x'"),
    "tune --nproc-per-node 3": (2, "3 ranks need 3 CUDA devices, there are 2"),
    "tune --nproc-per-node 1": (2, "one rank has nothing to communicate: 2 or more are needed"),
    "tune": (0, "there is no CUDA device, and nothing to choose between on the CPU"),
    "bench nope": (2, "no benchmark 'nope'; there are sweep_all_reduce_rms_norm"),
    "bench decode": (1, "one rank has nothing to communicate: 2 or more are needed"),
    "bench decode --nproc-per-node x": (2, "--nproc-per-node: must be a number above 0, got 'x'"),
    "bench decode --nproc-per-node 9": (2, "9 ranks need 9 CUDA devices, there are 2"),
}


@pytest.mark.parametrize("line", CASES)
def test_bad_command_lines(monkeypatch, capsys, tmp_path, line):
    devices, told = CASES[line]
    (tmp_path / "config.json").write_text("{")
    started: list[list[str]] = []
    monkeypatch.setattr(run, "main", started.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    try:
        status = cli.main(line.replace("FOLDER", str(pathlib.Path(tmp_path))).split())
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2 and not started and not captured.out
    assert told in captured.err.splitlines()[-1] and "Traceback" not in captured.err
