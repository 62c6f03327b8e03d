"""The scripts in launch/: two "nodes" of one rank each on this machine, which meet over the loopback address.

This file is also the program that those ranks run: a small model, applied, against the unsharded computation.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ("one_node.sh", "several_nodes.sh", "slurm.sh")
TORCHRUN_TELLS = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n'
SCONTROL = '#!/usr/bin/env bash\n[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf "localhost\\nlocalhost\\n"\n'
#: As many tasks as nodes, beside each other, with srun's own options taken away.
SRUN = """#!/usr/bin/env bash
[ "$1 $3 $4" = "--nodes --ntasks-per-node 1" ] || exit 9
nodes=$2; shift 4; children=()
for _ in $(seq "$nodes"); do "$@" & children+=($!); done
for child in "${children[@]}"; do wait "$child" || exit; done
"""


def _run(*command: str, env: dict[str, str], timeout: float = 200) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def _environment(folder: pathlib.Path, programs: dict[str, str], **variables: str) -> dict[str, str]:
    """This process's, with programs of those texts before all others, and this interpreter's torchrun behind them."""
    for name, text in programs.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(folder), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, tmp_path):
    """Also without arguments; it says how the script is called, and starts nothing."""
    env = _environment(tmp_path, {"torchrun": TORCHRUN_TELLS, "srun": TORCHRUN_TELLS})
    for options in (["--help"], ["-h"], []):
        done = _run(f"launch/{script}", *options, env=env)
        assert done.returncode == 0 and not done.stderr
        assert done.stdout.startswith("Start a program") and f"launch/{script} --" in done.stdout
        assert done.stdout.rstrip().count("#") == 0 and "set -e" not in done.stdout


def test_every_script_is_tested():
    assert {path.name for path in (ROOT / "launch").iterdir()} == set(SCRIPTS)


def test_arguments_are_passed_through(tmp_path):
    """In order and as they are, spaces too."""
    programs = {"torchrun": TORCHRUN_TELLS, "srun": TORCHRUN_TELLS, "scontrol": SCONTROL}
    env = _environment(tmp_path, programs, SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_ID="123456")
    program = ["--nproc-per-node", "2", "my script.py", "--my-option", "", "a b"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint"]
    several = ["--nnodes", "2", *meet, "h:1", "--rdzv-id", "tpfuse"]
    slurm = ["--nnodes", "2", *meet, "localhost:23456", "--rdzv-id", "123456"]
    for command, expected in {
        ("one_node.sh",): ["--standalone"],
        ("several_nodes.sh", "--nnodes", "2", "--endpoint", "h:1"): several,
        ("several_nodes.sh", "--node-rank", "0", "--endpoint", "h:1", "--nnodes", "2"): [
            *several, "--rdzv-conf", "is_host=true",
        ],
        ("several_nodes.sh", "--node-rank", "1", "--endpoint", "h:1", "--nnodes", "2"): [
            *several, "--rdzv-conf", "is_host=false",
        ],
        ("slurm.sh",): ["--nodes", "2", "--ntasks-per-node", "1", "torchrun", *slurm],
    }.items():  # fmt: skip
        done = _run(f"launch/{command[0]}", *command[1:], *program, env=env)
        assert done.stdout.split("\n")[:-1] == [*expected, *program], done.stderr


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["several_nodes.sh", "--nnodes", "2", "x.py"], "--endpoint HOST[:PORT] is missing"),
        (["several_nodes.sh", "--endpoint", "h", "x.py"], "--nnodes N is missing"),
        (["several_nodes.sh", "--nnodes"], "--nnodes: how many?"),
        (["slurm.sh", "x.py"], "not in a Slurm job"),
    ],
)
def test_what_is_missing(command, told, tmp_path):
    env = _environment(tmp_path, {"torchrun": TORCHRUN_TELLS, "srun": TORCHRUN_TELLS})
    env.pop("SLURM_JOB_NODELIST", None)
    done = _run(f"launch/{command[0]}", *command[1:], env=env)
    assert done.returncode != 0 and told in done.stderr and not done.stdout


def test_two_nodes_meet(tmp_path):
    """Both are this machine; the second is told that it is not the host of the rendezvous."""
    env = _environment(tmp_path, {})
    endpoint = ["--nnodes", "2", "--endpoint", f"localhost:{_free_port()}"]
    program = ["--nproc-per-node", "1", str(pathlib.Path(__file__)), str(tmp_path)]
    nodes = [
        subprocess.Popen(
            [ROOT / "launch" / "several_nodes.sh", *endpoint, "--node-rank", str(node), *program], env=env, cwd=ROOT
        )
        for node in (0, 1)
    ]
    try:
        assert [node.wait(200) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for each in found:
        assert each["world"] == 2 and each["local_world"] == 1 and each["fused"] == 1 and each["difference"] < 1e-5
    assert found[0]["agent"] != found[1]["agent"]


def test_slurm_starts_a_torchrun_on_every_node(tmp_path):
    """With a stand-in for Slurm: its srun runs the command once for each node of the job, here."""
    programs = {"srun": SRUN, "scontrol": SCONTROL}
    env = _environment(tmp_path, programs, SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_ID=str(os.getpid()))
    told = 'touch "$0/rank$RANK-of-$WORLD_SIZE-local$LOCAL_RANK"'
    done = _run(
        "launch/slurm.sh", "--nproc-per-node", "1", "--no-python", "bash", "-c", told, str(tmp_path), env=env
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0-of-2-local0", "rank1-of-2-local0"]


def _program(folder: str) -> None:
    import torch
    import torch.distributed as dist

    import tpfuse
    from tests.gloo.layers import Stack, largest_difference
    from tpfuse.testing import interpret_graphs

    dist.init_process_group("gloo")
    with interpret_graphs():
        model = tpfuse.apply(Stack(dist.group.WORLD, layers=1))
        found = {"difference": largest_difference(model, 7), "fused": tpfuse.explain(model).count("fuse_allreduce_rms")}
    found |= {"world": dist.get_world_size(), "local_world": int(os.environ["LOCAL_WORLD_SIZE"]), "agent": os.getppid()}
    pathlib.Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    _program(sys.argv[1])
