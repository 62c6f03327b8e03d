"""Every command of a bash block is known here: how it is checked, and why it is not simply run."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest
from torch.distributed import run as torchrun

from tests.docs.blocks import FILES, ROOT, Block, blocks, commands
from tpfuse import cli
from tpfuse.demo import arguments as demo_arguments
from tpfuse.tuner import arguments

COMMANDS = [(block, command) for path in FILES for block in blocks(path, "bash") for command in commands(block)]
_BENCHMARKS = ROOT / "benchmarks"


# -- how a command is checked: each raises AssertionError (or ends the process) if it is wrong -----------------------------


def _exact(*known: str) -> Callable[[Block, list[str]], None]:
    def check(block: Block, words: list[str]) -> None:
        assert shlex.join(words) in known, f"expected one of {known}"

    return check


def _tests(block: Block, words: list[str]) -> None:
    """Paths exist; -n and -k are pytest's."""
    assert words[:3] == ["python", "-m", "pytest"]
    rest = iter(words[3:])
    for word in rest:
        if word in ("-n", "-k"):
            next(rest)
        else:
            assert (ROOT / word).exists(), f"no {word}"


def _pip(block: Block, words: list[str]) -> None:
    """An editable install of this checkout, with extras that exist."""
    assert words[1:3] == ["install", "-e"] and len(words) == 4
    found = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", words[3])
    assert found, words
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^([\w-]+) = ", section, re.MULTILINE)
    assert set((found[1] or "").split(",")) - {""} <= set(extras)


def _tpfuse(block: Block, words: list[str]) -> None:
    """Its own parser takes the arguments."""
    command, rest = words[1], words[2:]
    if "--nproc-per-node" in rest:
        at = rest.index("--nproc-per-node")
        assert int(rest[at + 1]) > 0
        rest = rest[:at] + rest[at + 2 :]
    if command == "demo":
        demo_arguments.parse(rest)
    elif command == "tune":
        arguments.parse(rest)
    else:
        assert command == "bench" and rest[0] in cli.BENCHMARKS
        _options(_BENCHMARKS / f"{rest[0]}.py", rest[1:])


def _options(script: pathlib.Path, words: list[str]) -> None:
    """The script exists, and it or a module beside it knows every option."""
    assert script.is_file(), f"no {script}"
    beside = [path.read_text() for path in _BENCHMARKS.glob("*.py") if path.parent == script.parent]
    for word in (word for word in words if word.startswith("--") and word != "--help"):
        text = [script.read_text(), *(t for t in beside if word in t)]
        assert any(f'"{word}"' in t or word in t.partition('"""')[2] for t in text), f"{script.name} has no {word}"


def _python(block: Block, words: list[str]) -> None:
    _options(ROOT / words[1], words[2:])


def _torchrun(block: Block, words: list[str]) -> None:
    """torchrun's parser takes it, and its program is a module, a file of the checkout or what a block of the page shows."""
    args = torchrun.get_args_parser().parse_args(words[1:])
    if args.module:
        assert args.training_script == "tpfuse.demo"
        demo_arguments.parse(args.training_script_args)
    else:
        shown = {b.path for b in blocks(block.path, "python")}
        assert (ROOT / args.training_script).is_file() or shown, f"no {args.training_script}"


def _launch(block: Block, words: list[str], tmp_path: pathlib.Path) -> None:
    """The script hands torchrun (a stand-in, here) arguments that torchrun takes."""
    stand_in = tmp_path / "torchrun"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / words[0], *words[1:]], env=env, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    if "--help" not in words:
        _torchrun(block, ["torchrun", *done.stdout.splitlines()])


def _sbatch(block: Block, words: list[str]) -> None:
    """Slurm is not here: the script exists, and what goes to torchrun is torchrun's."""
    at = next(i for i, word in enumerate(words) if word.startswith("launch/"))
    assert os.access(ROOT / words[at], os.X_OK)
    _torchrun(block, ["torchrun", *words[at + 1 :]])


#: Beginning of a command -> (check, why it is not run as it stands). What is not here fails.
KNOWN: dict[str, tuple[Callable[..., None], str]] = {
    "python -m venv": (_exact("python -m venv .venv"), ".ci/run does it"),
    ". .venv/bin/activate": (_exact(". .venv/bin/activate"), "as above"),
    "pip install": (_pip, "installs gigabytes; .ci/run does it"),
    "pre-commit install": (_exact("pre-commit install"), "changes the checkout's hooks"),
    "ruff": (_exact("ruff check", "ruff format --check"), ".ci/run does it"),
    "mypy": (_exact("mypy"), ".ci/run does it"),
    "python -m pytest": (_tests, "this is such a run"),
    "tpfuse": (_tpfuse, "compiles for minutes, or needs GPUs; tests/unit/test_cli.py runs the commands"),
    "torchrun": (_torchrun, "the page's program is run by test_python.py"),
    "launch/": (_launch, "tests/gloo/test_launch.py starts ranks by them"),
    "sbatch": (_sbatch, "Slurm is not here; tests/gloo/test_launch.py runs the script with a stand-in"),
    "python benchmarks/": (_python, "takes minutes"),
    "python docs/generate.py": (_exact("python docs/generate.py"), "test_text.py does it"),
    ".ci/matrix": (_exact(".ci/matrix", ".ci/matrix 2.13 -- -n 2 tests/unit"), "installs gigabytes"),
    ".ci/run": (_exact(".ci/run"), "this is such a run"),
}


def _check(block: Block, command: str, tmp_path: pathlib.Path) -> None:
    variables = re.match(r"(?:[A-Z_]+=\S+ )*", command)
    assert variables is not None
    for name in re.findall(r"([A-Z_]+)=", variables[0]):
        assert any(name in path.read_text() for path in (ROOT / "tpfuse").rglob("*.py")), f"nothing reads {name}"
    command = command[variables.end() :]
    beginnings = [known for known in KNOWN if command.startswith(known)]
    assert beginnings, f"unknown command: say in KNOWN how it is checked: {command!r}"
    check, _ = KNOWN[max(beginnings, key=len)]
    words = shlex.split(command)
    check(block, words, tmp_path) if check is _launch else check(block, words)


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[command[:60] for _, command in COMMANDS])
def test_command(block, command, tmp_path):
    for part in re.split(r" (?:&&|;|\|) ", command):
        _check(block, part, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        "make all",
        "pip install -e '.[everything]'",
        "tpfuse tune --hiden 4096",
        "tpfuse bench nothing",
        "tpfuse demo --layers x",
        "torchrun --nproc 2 --no-such-option example.py",
        "python benchmarks/families.py --no-such-option",
        "python -m pytest tests/nothing",
        "TPFUSE_NOTHING=1 tpfuse demo",
        "launch/several_nodes.sh --nnodes 2 program.py",
    ],
)
def test_a_wrong_command_fails(wrong, tmp_path, capfd):
    block = Block(ROOT / "README.md", 1, "bash", wrong)
    with pytest.raises((AssertionError, SystemExit)):
        _check(block, wrong, tmp_path)


def test_both_commands_and_the_test_command_are_in_the_readme():
    there = [command for block, command in COMMANDS if block.path.name == "README.md"]
    assert {"pip install -e '.[test]'", "tpfuse demo", "python -m pytest -n 2"} <= set(there)
    assert "python -m pytest -n 2" in (ROOT / ".ci" / "run").read_text() and sys.version_info >= (3, 10)
