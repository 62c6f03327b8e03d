"""The sdist and the wheel: what is in them, that a wheel made of the sdist works installed, and what the extras ask for."""

from __future__ import annotations

import email
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement

import tpfuse
from tpfuse import environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Extras whose packages need not be installed where tests run.
ONLY_SOME_MACHINES = {
    "flashinfer": "needs GPUs",
    "nccl-cu12": "excludes torch's NCCL for CUDA 13",
    "bench": "plots",
    "dev": "linters",
}
_BUILD = "import setuptools.build_meta as backend, sys; print(backend.build_{kind}(sys.argv[1]))"


def _run(*command: str, cwd: pathlib.Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _tracked(*patterns: str) -> list[str]:
    """Files of the checkout, without what was only made in it."""
    ignored = ("__pycache__", ".egg-info")
    found = (path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return sorted(str(p.relative_to(ROOT)) for p in found if not any(part in str(p) for part in ignored))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """(sdist, wheel): the sdist of a copy of this checkout, the wheel of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("built")
    made = ("*.egg-info", "__pycache__", ".*", "build", "dist")
    copy = shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*made))
    sdist = folder / _run(sys.executable, "-c", _BUILD.format(kind="sdist"), str(folder), cwd=copy).split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = folder / _run(sys.executable, "-c", _BUILD.format(kind="wheel"), str(folder), cwd=source).split()[-1]
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(built) -> email.message.Message:
    with zipfile.ZipFile(built[1]) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == _tracked("tpfuse/**/*")
    for ending in (".cu", ".cuh", ".json", "py.typed"):
        assert any(name.endswith(ending) for name in names)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_docs_and_launch_scripts_too(built):
    with tarfile.open(built[0]) as archive:
        modes = {member.name.partition("/")[2]: member.mode for member in archive.getmembers() if member.isfile()}
    wanted = _tracked("tpfuse/**/*", "docs/**/*", "launch/*", "README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml")
    made = {"PKG-INFO", "setup.cfg", "MANIFEST.in"}
    assert sorted(name for name in modes if ".egg-info/" not in name and name not in made) == wanted
    assert all(modes[name] & 0o100 for name in modes if name.startswith("launch/")), "scripts that cannot be run"


def test_the_wheel_works_installed(built, tmp_path):
    """From a folder of its own, away from the checkout: the package, its data and the console script."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "site"))
    _run(*pip, str(built[1]), cwd=tmp_path)
    told = _run(
        sys.executable, "-c",
        "import runpy, sys, tpfuse; from tpfuse import tables; from tpfuse.kernels.cuda import build\n"
        "print(tpfuse.__file__, tables.shipped(tables.Machine('NVIDIA H200', 'nvlink', 2)).machine)\n"
        "sys.argv = ['tpfuse', '--help']; runpy.run_path('site/bin/tpfuse', run_name='__main__')",
        cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"),
    )  # fmt: skip
    first, _, usage = told.partition("\n")
    assert first == f"{tmp_path / 'site' / 'tpfuse' / '__init__.py'} 2 x NVIDIA H200 (nvlink)"
    assert usage.startswith("usage: tpfuse")


def test_metadata(built, metadata):
    assert metadata["Version"] == tpfuse.__version__ and metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(built[1]) as archive:
        points = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    assert "tpfuse = tpfuse.cli:main" in points and "tpfuse = tpfuse.graph.backend:tpfuse_backend" in points


def test_torch_versions(metadata):
    """The requirement, and what is checked when tpfuse is used, are one range."""
    (torch,) = (r for r in map(Requirement, metadata.get_all("Requires-Dist")) if r.name == "torch")
    (*_, last) = (minor for minor in range(environment.OLDEST[1], 99) if torch.specifier.contains(f"2.{minor}.9"))
    assert (2, last + 1) == environment.TOO_NEW
    assert torch.specifier.contains(f"2.{environment.OLDEST[1]}.0")
    assert not torch.specifier.contains(f"2.{environment.OLDEST[1] - 1}.9")


def test_extras(metadata):
    """Every extra asks for something that exists: what is installed here satisfies it, or it is for some machines only."""
    extras = metadata.get_all("Provides-Extra")
    needed: dict[str, list[Requirement]] = {extra: [] for extra in extras}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        for extra in extras:
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                needed[extra].append(requirement)
    assert {"hf", "bench", "cuda", "test", "dev", "flashinfer"} <= set(extras)
    for extra, requirements in needed.items():
        assert requirements, f"{extra} asks for nothing"
        for requirement in requirements:
            if requirement.name == "tpfuse":
                assert requirement.extras <= set(extras), requirement
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                assert extra in ONLY_SOME_MACHINES, f"tpfuse[{extra}]: {requirement} is not installed"
            else:
                assert requirement.specifier.contains(version, prereleases=True), (
                    f"tpfuse[{extra}]: {requirement}: {version}"
                )


def test_the_matrix_has_all_supported_versions():
    text = (ROOT / ".ci" / "matrix").read_text()
    versions = " ".join(f"2.{minor}" for minor in range(environment.OLDEST[1], environment.TOO_NEW[1]))
    assert f"versions=({versions})" in text
