"""CUDA C++ sources to loaded kernels: compiled by NVRTC on first use, kept on disk per architecture and options.

Nothing but the driver and NVRTC is needed, which torch brings: no nvcc, no CUDA headers. A file's name has a digest of
everything that went into it; it is written whole or not at all, and one that does not load is made anew.

Source: cuda.core for NVRTC, cuda.bindings for the driver.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import uuid
from typing import Any

import torch

from tpfuse import tables
from tpfuse.errors import BuildError, ConfigError

_FOLDER = pathlib.Path(__file__).parent
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def name_of(files: tuple[str, ...], options: tuple[tuple[str, int], ...]) -> str:
    """Name of the kernel in the last of the files, as profilers show it: the operation that it computes."""
    stem = pathlib.Path(files[-1]).stem
    return f"tpfuse_{'matmul_all_reduce' if ('ALL_ROWS', 1) in options else stem}"


@functools.cache
def kernel(files: tuple[str, ...], options: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> int:
    """The handle (CUfunction) of a kernel on a device, loaded: its first launch loads nothing any more.

    files    of this folder, compiled as one, in this order
    options  macros
    Raises BuildError: NVRTC or the driver refuses, or their bindings are not installed.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context is there
        major, minor = torch.cuda.get_device_capability(device)
        arch, name = f"sm_{major}{minor}a", name_of(files, options)
        try:
            return _load(compiled(files, options, arch)[1], name, shared_bytes)
        except BuildError:
            return _load(compiled(files, options, arch, anew=True)[1], name, shared_bytes)


def compiled(
    files: tuple[str, ...], options: tuple[tuple[str, int], ...], arch: str, anew: bool = False
) -> tuple[pathlib.Path, bytes]:
    """(where it is kept, the cubin). Needs no device. Raises BuildError.

    anew  whatever is kept there
    """
    program, make_options, version = _compiler()
    source = "".join((_FOLDER / file).read_text(encoding="utf-8") for file in files)
    digest = hashlib.sha256(repr((source, options, arch, version)).encode()).hexdigest()[:24]
    path = _cache() / f"{pathlib.Path(files[-1]).stem}-{arch}-{digest}.cubin"
    with contextlib.suppress(OSError):
        if not anew:
            return path, path.read_bytes()
    macros = [(key, str(value)) for key, value in options]
    try:
        made = program(source, "c++", make_options(arch=arch, std="c++17", define_macro=macros))
        code = bytes(made.compile("cubin").code)
    except Exception as error:  # what NVRTC and its bindings raise differs by version
        raise BuildError(f"NVRTC: {files[-1]}: {error}") from error
    _keep(path, code)
    return path, code


def _cache() -> pathlib.Path:
    try:
        return tables.cache_folder() / "kernels"
    except ConfigError:  # no home folder: as if it could not be written
        return pathlib.Path(os.devnull) / "kernels"


def _keep(path: pathlib.Path, code: bytes) -> None:
    """A folder that cannot be written costs a compilation in every process, and nothing else."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(code)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _compiler() -> tuple[Any, Any, str]:
    """(Program, ProgramOptions, version of NVRTC)"""
    try:
        from cuda.bindings import nvrtc

        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before cuda.core 1.0
            from cuda.core.experimental import Program, ProgramOptions
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BuildError(f"cuda.core: {error}") from error
    return Program, ProgramOptions, f"{major}.{minor}"


def _load(code: bytes, name: str, shared_bytes: int) -> int:
    cuda = driver()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = done(cuda.cuThreadExchangeStreamCaptureMode(relaxed))  # loading is no part of what may be captured just now
    try:
        library = done(cuda.cuLibraryLoadData(code, None, None, 0, None, None, 0))
        found = done(cuda.cuLibraryGetKernel(library, name.encode()))
        function = done(cuda.cuKernelGetFunction(found))  # loads it now
        done(cuda.cuFuncSetAttribute(function, cuda.CUfunction_attribute(_SHARED_BYTES), shared_bytes))
        return int(function)
    finally:
        done(cuda.cuThreadExchangeStreamCaptureMode(before))


@functools.cache
def driver() -> Any:
    """The driver's functions. Raises BuildError: their bindings are not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BuildError(f"cuda.bindings: {error}") from error
    return driver


def done(results: tuple[Any, ...]) -> Any:
    """What a driver call returns, without its status. Raises BuildError."""
    status, *values = results
    if int(status):
        raise BuildError(f"the driver: {status.name}")
    return values[0] if values else None
