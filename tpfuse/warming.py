"""``warmup``: compile, allocate and capture before traffic comes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tpfuse import switch
from tpfuse.api import check, explain
from tpfuse.applied import AppliedModel, applied_to
from tpfuse.comm import agreement
from tpfuse.config import is_disabled
from tpfuse.errors import ConfigError, TpfuseError, first_line
from tpfuse.logs import logger
from tpfuse.report import Report

#: Calls at each count. A second length makes a graph for varying lengths, so all are seen again after all were seen; a CUDA
#: graph is captured at its second call and replayed at its third.
_PASSES = 3
_log = logger(__name__)

Inputs = Callable[[int], tuple[tuple, dict[str, Any]]]


def warmup(
    model: torch.nn.Module,
    token_counts: Iterable[int],
    *,
    inputs: Inputs | None = None,
    call: Callable[[int], Any] | None = None,
    progress: bool = True,
) -> Report:
    """Run an applied model for each number of tokens, so that later calls like these compile and allocate nothing.

        tpfuse.warmup(model, [1, 16, 512])  # model(input_ids)
        tpfuse.warmup(model, [1, 512], inputs=lambda count: ((), dict(inputs_embeds=x[:, :count])))
        tpfuse.warmup(model, [1, 512], call=lambda count: model.generate(prompt[:, :count], max_new_tokens=4))

    token_counts  tokens (rows) of a call
    inputs        called with a count, returns (args, kwargs) of the model for it; None: ``model(input_ids)`` with random
                  ids [1, count], where ``forward`` needs nothing else
    call          called with a count, does all that such a call does, in the caller's mode of gradients: for
                  ``generate()``, for a cache that decode steps share, for a training step with its backward
    progress      a bar on rank 0, if tqdm is installed
    returns       the report: it says what was warmed up, and which range of row counts no call was in

    Calls are told apart as ``torch.compile`` does: other arguments, or the same by keyword instead of position, compile
    again. Each count runs three times: all kernels are compiled, arenas made, CUDA graphs captured (``mode``
    "reduce-overhead"). But for ``call`` it runs under ``torch.no_grad()`` (inside ``torch.inference_mode()`` if the caller
    is). Buffers of the model and the states of torch's random generators are afterwards as they were; a copy of the buffers
    is held meanwhile. Collective: every rank of the model's groups calls it with the same arguments.

    Raises NotAppliedError: ``apply`` was not applied to this model. ConfigError: a count is no positive whole number, or
    the inputs cannot be guessed. AgreementError: ranks differ in what they ask for, or another rank failed.
    """
    applied = applied_to(model)
    if applied is None or is_disabled():
        return explain(model)  # or NotAppliedError
    counts, failure = [], None
    try:
        counts, run = _counts(token_counts), _run(applied, inputs, call)
    except TpfuseError as error:
        failure = error
    proposal = {
        "token counts": str(counts),
        "how": "call" if call else "inputs" if inputs else "the model's signature",
        "gradients": f"{torch.is_grad_enabled()}, inference mode: {torch.is_inference_mode_enabled()}",
    }
    _agree(applied, proposal, failure)
    with _undisturbed(model), _bar(len(counts) * _PASSES, progress) as advance:
        for _ in range(_PASSES):
            before = applied.recorder.graphs
            for count in counts:
                run(count)
                advance(count)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    check()
    _tell(applied, counts, applied.recorder.graphs - before)
    return applied.report()


def _agree(applied: AppliedModel, proposal: dict[str, str], failure: TpfuseError | None) -> None:
    """Raise on every rank if one failed, or asks for something else."""
    for group in applied.groups:  # all of them, also after a failure
        try:
            agreement.agree(group, "tpfuse.warmup", proposal, failure)
        except TpfuseError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _counts(given: Iterable[int]) -> list[int]:
    counts = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not counts or not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        raise ConfigError(f"token_counts must be positive whole numbers, at least one, got {given!r}")
    return list(dict.fromkeys(counts))


def _run(applied: AppliedModel, inputs: Inputs | None, call: Callable[[int], Any] | None) -> Callable[[int], Any]:
    """What is done for a count. Raises ConfigError: it is not known."""
    if switch.is_off():
        raise ConfigError("warmup inside tpfuse.disabled() would warm up nothing: call it outside")
    if inputs is not None and call is not None:
        raise ConfigError("warmup takes inputs or call, not both")
    if call is not None:
        return call
    made = inputs or _guess(applied.model)

    def run(count: int) -> None:
        given, failure = None, None
        try:
            args, kwargs = given = made(count)
        except Exception as error:  # a caller's function: the other ranks must not wait for a call that never comes
            failure = ConfigError(
                f"inputs({count}) must return (args, kwargs): {type(error).__name__}: {first_line(error)}"
            )
            failure.__cause__ = error
        _agree(applied, {"count": str(count)}, failure)
        assert given is not None
        with torch.no_grad():
            applied.model(*args, **kwargs)

    return run


def _guess(model: torch.nn.Module) -> Inputs:
    """Random ids, as the first and only argument that the model needs."""
    parameters = inspect.signature(model.forward).parameters
    needed = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if next(iter(parameters), "") != "input_ids" or set(needed) - {"input_ids"}:
        told = ", ".join(needed or parameters) or "none"
        raise ConfigError(
            f"warmup can make input_ids only, and the arguments of {type(model).__name__}.forward are: {told}; "
            "give inputs=, a function of the token count that returns (args, kwargs)"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 1)

    def make(count: int) -> tuple[tuple, dict[str, Any]]:
        ids = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(count))
        return (ids.to(device),), {}

    return make


@contextlib.contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Buffers, and the states of random generators, are at the end what they were."""
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t  # noqa: E731
    held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    with torch.no_grad():
        values = [local(buffer).clone() for _, _, buffer in held]
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(held, values, strict=True):
                module._buffers[name] = buffer
                if not torch.equal(local(buffer), value):
                    local(buffer).copy_(value)  # in place: a CUDA graph knows its address


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A function that takes the count of each call that is done."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not progress or not first:
        yield lambda count: None
        return
    with tqdm(total=total, desc="tpfuse warm-up", unit="call") as bar:

        def advance(count: int) -> None:
            bar.set_postfix(tokens=count, refresh=False)
            bar.update()

        yield advance


def _tell(applied: AppliedModel, counts: list[int], late: int) -> None:
    """Note what is ready, and what is not."""
    told, recorder = ", ".join(map(str, counts)), applied.recorder
    if late:
        recorder.warn(f"warm-up at {told} tokens: {late} graph(s) were still compiled in its last pass, more may come")
    else:
        recorder.note(f"warmed up at {told} tokens: such calls compile nothing more")
    for variant in applied.variants_without_calls():
        recorder.note(f"warm-up had no call with {variant}: the first one compiles")
    _log.info("warmed up %s at %s tokens: %d graph(s)", type(applied.model).__name__, told, recorder.graphs)
