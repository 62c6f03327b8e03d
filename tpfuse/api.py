"""``apply``, ``remove``, ``explain``: find groups -> agree -> compile in place -> report."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpfuse import environment, sharding
from tpfuse.applied import AppliedModel, Request, applied_to
from tpfuse.comm import agreement, arena, groups
from tpfuse.compiling import CompileOptions
from tpfuse.config import DEBUG_VARIABLE, DISABLE_VARIABLE, FusionConfig, is_debugging, is_disabled
from tpfuse.errors import ConfigError, NotAppliedError, TpfuseError
from tpfuse.graph import pipeline
from tpfuse.graph.places import fingerprint
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM, BATCH_INVARIANT, CANDIDATES
from tpfuse.logs import logger
from tpfuse.models.find_groups import find_groups
from tpfuse.report import Recorder, Report
from tpfuse.version import __version__

_log = logger(__name__)


def apply(
    model: torch.nn.Module,
    config: FusionConfig | Mapping[str, Any] | str | os.PathLike | list[str] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = False,
    verify: int | None = None,
    **compile_options: Any,
) -> torch.nn.Module:
    """Make the communication of a tensor-parallel model as fast as the machine allows, in place.

        model = tpfuse.apply(model)
        model(input_ids)            # the first call compiles
        print(tpfuse.explain(model))

    model    any nn.Module that is already sharded: Hugging Face ``tp_plan``, DTensor ``parallelize_module``, or by hand
             with ``torch.distributed`` collectives. Its parameters, state_dict keys, class and methods stay as they are.
    config   FusionConfig, dict, path of a JSON file, or "key=value" strings; None: the defaults
    group    a tensor-parallel process group of the model, where it cannot be found on the model itself
    strict   raise StrictError after the first call if nothing (or nothing of what the config names) was fused; of
             ``enable_sp`` and ``fuse_gemm_comms`` with it, after the first of so many rows that they may be sharded
    verify   compare every ``verify``-th call of each compiled graph, the first included, with the graph as it was before
             tpfuse: each operation of tpfuse, on the values that it has there (docs/verify.md); None or 0: never, at no
             cost. A call that is compared takes several times as long (12 on CPU ranks; not measured on GPUs)
    compile_options  as for ``torch.compile``: mode, options, dynamic, fullgraph
    returns  the same model

    Collective: every rank of the model's groups calls it, with the same arguments. With gradients on, forward and backward
    are fused together; a model of DTensors then has a graph for each shape, unless ``dynamic`` is given, and where torch
    fails to compile a first step the model runs as it was (not with ``strict`` or ``fullgraph``). Applying again with the
    same arguments changes nothing; with others, they take the place of the first. ``TPFUSE_DISABLE=1`` in the
    environment (of every rank) turns everything off.

    Raises ConfigError: bad configuration, a field asked for by name that this version, machine or model cannot honour,
    or an unsupported torch.
    Calls raise VerificationError, on every rank of a group: with ``verify``, one of them has found a difference.
    Raises AgreementError: ranks differ in what they ask for, or another rank failed. Both are raised on every rank.
    """
    _check_model(model)
    if group is not None:
        groups.check(group)
    found = find_groups(model) if group is None else [group]
    failure: TpfuseError | None = None
    request: Request | None = None
    try:
        request = _request(model, config, strict, verify, compile_options, found)
    except TpfuseError as error:
        failure = error
    for each in found:  # all of them, also after a failure: the ranks of every group wait for this one's word
        try:
            agreement.agree(each, "tpfuse.apply", dict(request.proposal) if request else {}, failure)
        except TpfuseError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    assert request is not None
    before = applied_to(model)
    if before is not None:
        if before.request.proposal == request.proposal:
            return model
        before.remove()
    if is_disabled():
        return model
    applied = AppliedModel(model, request, found)
    applied.install()
    _note(applied, found)
    on = ", ".join(name for name, fusion in request.fusions.items() if fusion.on) or "nothing"
    names = [each.group_name for each in found]
    _log.info("applied to %s: on: %s; process groups: %s", type(model).__name__, on, names)
    return model


def remove(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``apply``: the model is what it was before. Harmless on a model that was never applied. Returns the model.

    Raises ConfigError: it is no torch.nn.Module.
    """
    _check_model(model)
    applied = applied_to(model)
    if applied is not None:
        applied.remove()
    return model


def explain(model: torch.nn.Module) -> Report:
    """What became of every all-reduce of an applied model. Complete once a call of each kind has been made.

    Raises NotAppliedError (a ValueError): ``apply`` was never called on this model, or was removed, or the model's own
    ``compile()`` has taken its place since. Raises ConfigError: it is no torch.nn.Module.
    """
    _check_model(model)
    applied = applied_to(model)
    if applied is not None:
        return applied.report()
    if is_disabled():
        recorder = Recorder(FusionConfig(optimization_level=0).resolve({}))
        recorder.note(f"{DISABLE_VARIABLE} is set: the model runs as it is")
        return recorder.report()
    since = "" if model._compiled_call_impl is None else ", or its compile() was called since and has taken its place"
    raise NotAppliedError(f"tpfuse.apply was not applied to this {type(model).__name__}{since}")


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("model must be a torch.nn.Module that is no ScriptModule: torch.compile cannot see into one")


def _request(
    model: torch.nn.Module,
    config: Any,
    strict: bool,
    verify: int | None,
    compile_options: dict[str, Any],
    found: list[dist.ProcessGroup],
) -> Request:
    environment.check()
    if not isinstance(strict, bool):
        raise ConfigError(f"strict must be True or False, got {strict!r}")
    if verify is not None and (not isinstance(verify, int) or isinstance(verify, bool) or verify < 0):
        raise ConfigError(f"verify must be None or a whole number of at least 0, got {verify!r}")
    known = [p for p in inspect.signature(torch.compile).parameters if p not in ("model", "backend", "disable")]
    for name in compile_options:
        if name not in known:
            raise ConfigError(
                f"unknown argument {name!r}; apply takes config, group, strict, verify and {', '.join(known)}"
            )
    options = CompileOptions.of(compile_options)
    options.check()
    loaded = FusionConfig.load(config)
    fusions = pipeline.resolve(loaded)
    _check_kernels(loaded, model)
    threshold = sharding.threshold(loaded, fusions, model, found)
    settled = dataclasses.replace(loaded, sp_min_token_num=threshold.rows)
    proposal = {
        "tpfuse": __version__,
        "torch": str(torch.__version__),
        DISABLE_VARIABLE: str(is_disabled()),
        DEBUG_VARIABLE: str(is_debugging()),
        "config": json.dumps(loaded.to_dict(), sort_keys=True),
        "sp_min_token_num, which is by each machine's table unless it is given": str(threshold.rows),
        "strict": str(strict),
        "verify": str(verify or 0),
        "compile options": options.told,
        "model": f"{type(model).__name__} {fingerprint(model)}",
    }
    return Request(settled, fusions, strict, verify or 0, options, proposal, threshold.source)


def _check_kernels(config: FusionConfig, model: torch.nn.Module) -> None:
    """A kernel that was asked for by name must exist, and have a device to run on.

    Whether the groups of the model have the memory for it is seen at their first graph.
    """
    known = CANDIDATES[ALL_REDUCE_RMS_NORM]
    if config.allreduce_rms_kernel is not None and config.allreduce_rms_kernel not in known:
        near = difflib.get_close_matches(config.allreduce_rms_kernel, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown allreduce_rms_kernel {config.allreduce_rms_kernel!r}; the nearest valid one is {near!r}"
        )
    if config.batch_invariant and config.allreduce_rms_kernel not in (None, BATCH_INVARIANT):
        raise ConfigError(
            f"batch_invariant=True cannot be honoured by allreduce_rms_kernel {config.allreduce_rms_kernel!r}: only "
            f"{BATCH_INVARIANT!r} computes a row alike in any batch"
        )
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    device = tensor.device.type if tensor is not None else "cpu"
    if config.fuse_allreduce_rms and device not in ("cpu", "cuda"):
        raise ConfigError(f"fuse_allreduce_rms=True cannot be honoured: this version has no kernel for {device}")


def check() -> None:
    """Raise PeerTimeoutError if a kernel has given up waiting for another rank. Does not synchronise with the device.

    Every call of an applied model does the same first.
    """
    arena.check()


def _note(applied: AppliedModel, found: list[dist.ProcessGroup]) -> None:
    note = applied.recorder.note
    if applied.request.sharding:
        note(applied.request.sharding)
    if not dist.is_available() or not dist.is_initialized():
        note("torch.distributed is not initialized: no tensor-parallel group, nothing to fuse")
    elif not found:
        note("no process group found on the model: taken from the collectives in its graph")
    for each in found:
        if groups.size(each.group_name) == 1:
            note(f"group {each.group_name!r} has one rank: nothing to fuse")
