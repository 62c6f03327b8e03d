"""The object that stands in front of an applied model: it picks a compiled variant for each call and keeps the report."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.tensor import DTensor

from tpfuse import compiling, switch, tokens
from tpfuse.comm import agreement, arena, groups
from tpfuse.compiling import CompileOptions
from tpfuse.config import FusionConfig, Resolved, is_debugging
from tpfuse.errors import GroupError, StrictError, TpfuseError, first_line
from tpfuse.graph.backend import TpfuseBackend, training_variant
from tpfuse.graph.places import Places
from tpfuse.models import generate, grad_hooks
from tpfuse.models.find_groups import find_groups
from tpfuse.report import Recorder, Report

#: What calls of too few rows to be sharded need not have.
_SHARDED_FUSIONS = ("enable_sp", "fuse_gemm_comms")
#: What is told of calls inside ``tpfuse.disabled()``.
_DISABLED = "tpfuse.disabled"
#: What ranks compare at the first graph of a variant.
FIRST_CALL = "a first call of an applied model"


@dataclasses.dataclass(frozen=True)
class Request:
    """What one ``apply`` asked for. Two equal requests on one model are one."""

    config: FusionConfig
    fusions: Mapping[str, Resolved]
    strict: bool
    verify: int
    compile_options: CompileOptions
    proposal: Mapping[str, str]  # what the ranks of every group must have in common
    sharding: str = ""  # from how many rows on they are sharded, and why


class AppliedModel:
    """Takes every call of the model. ``model._compiled_call_impl`` is where nn.Module looks for it.

    One callable is compiled per range of row counts, for inference and for training, and per set of compile options, when a
    call first needs it. Each has a code object of its own, so that Dynamo's caches and recompile limits do not mix.
    """

    def __init__(self, model: torch.nn.Module, request: Request, found: Sequence[dist.ProcessGroup]) -> None:
        """found: groups that the model names (or the user), whose ranks have the same rows."""
        self.model, self.request, self.groups = model, request, tuple(found)
        self.recorder, self.places = Recorder(request.fusions), Places(model)
        self.previous_call = model._compiled_call_impl
        self._tensor_parallel = frozenset(group.group_name for group in found)
        # By group, kind of graph and the model's modules, once the group's ranks have been asked.
        self._alike: dict[tuple[str, str, str], bool] = {}
        self._groups: set[weakref.ref[dist.ProcessGroup]] = set()  # of graphs; names come again when groups are made anew
        self._callables: dict[tuple[int, bool, str], Callable] = {}
        self._succeeded: set[tuple[int, bool, str]] = set()  # keys of callables that have run
        self._boundaries = request.config.row_boundaries(request.fusions)
        self._checked_strictly = not request.strict
        self._debugging = is_debugging()
        self._paused = ""  # why calls run the model as it is
        self._bypassed: list[torch.nn.Module] = []

    def install(self) -> None:
        self._bypassed = grad_hooks.bypass(self.model)
        generate.take_over(self.model)
        self.model._compiled_call_impl = self

    def remove(self) -> None:
        self.model._compiled_call_impl = self.previous_call
        generate.give_back(self.model)
        grad_hooks.restore(self._bypassed)
        self._callables.clear()

    def report(self) -> Report:
        self.recorder.forget(self.places.refresh())
        return self.recorder.report()

    def variants_without_calls(self) -> list[str]:
        """Names of the ranges of row counts that nothing was compiled for."""
        called = {index for index, *_ in self._callables}
        every = range(len(self._boundaries) + 1)
        return [tokens.variant_name(self._boundaries, index) for index in every if index not in called]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.request.compile_options, args, kwargs)

    def with_options(self, **compile_options: Any) -> Callable:
        """The same model under other torch.compile options; those given to ``apply`` by name win."""
        given = self.request.compile_options.values
        merged = {**compile_options, **given}
        if given.get("options"):
            merged.pop("mode", None)  # torch.compile takes one of the two
        options = CompileOptions.of(merged)
        return lambda *args, **kwargs: self._call(options, args, kwargs)

    @contextlib.contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """Calls run the model as it is, in this block."""
        before, self._paused = self._paused, why
        try:
            yield
        finally:
            self._paused = before

    def _call(self, compile_options: CompileOptions, args: tuple, kwargs: dict[str, Any]) -> Any:
        as_it_is = self.previous_call or self.model._call_impl
        if torch.compiler.is_compiling():
            return as_it_is(*args, **kwargs)  # inside somebody else's torch.compile
        arena.check()
        if not all(map(_lives, self._groups)):
            self._start_anew()
        if switch.is_off():
            if self._debugging:
                self._compare(_DISABLED, compile_options)
            return as_it_is(*args, **kwargs)
        if self._paused:
            self.recorder.note(f"{self._paused}: the model ran as it was before tpfuse.apply")
            return as_it_is(*args, **kwargs)
        index = 0
        if self._boundaries:
            rows = tokens.count_tokens(self.model.forward, args, kwargs, self.request.config.token_count_from)
            index = bisect.bisect_right(self._boundaries, rows)
        if self._debugging:
            self._compare(tokens.variant_name(self._boundaries, index), compile_options)
        key = (index, torch.is_grad_enabled(), compile_options.key)
        compiled = self._callables.get(key)
        if compiled is None:
            compiled = self._callables[key] = self._compile(index, compile_options)
        try:
            with compiling.room_for_graphs():
                result = compiled(*args, **kwargs)
        except Exception as error:
            ours = _ours(error)
            if ours is not None:
                raise ours from None
            if not isinstance(error, TorchDynamoException) or not self._may_give_up(key, compile_options):
                raise
            result = as_it_is(*args, **kwargs)  # or the model's own error: then it was not torch that failed
            cause = getattr(error, "inner_exception", None) or error
            told = f"{type(cause).__name__}: {first_line(cause)}"
            self.recorder.warn(f"torch failed on a training step, and the model runs as it was before tpfuse.apply: {told}")
            self.recorder.withdraw(training_variant(tokens.variant_name(self._boundaries, index)))
            self._callables[key] = as_it_is
            return result
        if not self._checked_strictly and key not in self._succeeded:
            self._check_strictly(index)
        self._succeeded.add(key)
        return result

    def _may_give_up(self, key: tuple[int, bool, str], compile_options: CompileOptions) -> bool:
        """Whether the model may run as it is after an error of its first training step: it did before it was applied.

        An error of the compiler, that is: it meets all ranks, for they have the same model.
        """
        asked = self.request.strict or compile_options.values.get("fullgraph")
        return torch.is_grad_enabled() and key not in self._succeeded and not asked

    def _compile(self, index: int, compile_options: CompileOptions) -> Callable:
        """The model compiled for the index-th range of row counts; with gradients on, for training."""
        for_backend = {"mode", "options", "dynamic"}
        values = dict(compile_options.values)
        dtensors = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        if torch.is_grad_enabled() and dtensors and values.get("dynamic") is None:
            values["dynamic"] = False  # torch (to 2.13) fails to compile their backward for varying lengths
            self.recorder.note("training with DTensors: a graph for each shape, unless dynamic is given")
        variant = tokens.variant_name(self._boundaries, index)
        backend = TpfuseBackend(
            self.request.fusions,
            self.recorder,
            variant=variant,
            rows=tokens.row_range(self._boundaries, index),
            places=self.places,
            agree=_weakly(self, variant),
            config=self.request.config,
            verify=self.request.verify,
            **{name: value for name, value in values.items() if name in for_backend},
        )
        rest = {name: value for name, value in values.items() if name not in ("mode", "options")}
        entry = compiling.entry(self.model)
        weakref.finalize(entry, compiling.forget, entry.__code__, entry.__globals__, backend).atexit = False
        return torch.compile(entry, backend=backend, **rest)

    def _agree(self, variant: str, group_name: str, digest: str, training: bool) -> bool:
        """At a group's first graph, its first of training, and the first of each after modules were replaced: compare the
        request with its other ranks, and whether they have the same graph. A tensor-parallel group does so for each
        variant, for its ranks call the same one.

        A hook may keep a value that a merged or fused all-reduce would no longer have, or break the graph. If only some
        ranks have such a hook, none changes a collective: their number and order must not depend on the rank.
        """
        called = training_variant(variant) if training else variant
        same_rows = {"rows of a call": called} if group_name in self._tensor_parallel else {}
        key = (group_name, called if same_rows else str(training), self.places.fingerprint)
        if key not in self._alike:
            hooked = [n for n, m in self.model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
            proposal = {**self.request.proposal, **same_rows, "modules": self.places.fingerprint}
            group = groups.resolve(group_name)
            self._groups.add(weakref.ref(group))
            self._alike[key] = agreement.agree(group, FIRST_CALL, proposal, may_differ=f"{digest} {hooked}")
            if not self._alike[key]:
                self.recorder.warn("ranks have different graphs or forward hooks: their collectives are not changed")
        return self._alike[key]

    def _start_anew(self) -> None:
        """A group was destroyed. Graphs know it by its name, which another group may have by now: drop all of them.

        Raises GroupError: a layer still has a destroyed group. Dynamo would take the other of that name without a word.
        """
        found = find_groups(self.model)
        if not all(map(groups.exists, found)) or (self.groups and not found):
            raise GroupError(agreement.DESTROYED)
        self.groups, self._tensor_parallel = tuple(found), frozenset(group.group_name for group in found)
        self._groups.clear()
        self._alike.clear()
        self._callables.clear()
        self._succeeded.clear()
        self.recorder.restart()
        self.recorder.note("a process group was destroyed: the model was compiled anew")

    def _compare(self, variant: str, compile_options: CompileOptions) -> None:
        """TPFUSE_DEBUG: before a call, the ranks of tensor-parallel groups that a graph has compare which variant they
        call. Before the first graph all found groups do, one of data parallelism too: whether they call tpfuse at all."""
        called = training_variant(variant) if torch.is_grad_enabled() else variant
        proposal = {"rows of a call": called, "compile options": compile_options.told}
        names = list(dict.fromkeys(name for name, *_ in self._alike if name in self._tensor_parallel))
        if not names:
            names, proposal = sorted(self._tensor_parallel), {_DISABLED: str(variant == _DISABLED)}
        for name in names:
            agreement.agree(groups.resolve(name), "a call of an applied model", proposal)

    def _check_strictly(self, index: int) -> None:
        """After the first call of the index-th range of row counts."""
        report, request = self.report(), self.request
        asked = [name for name, r in request.fusions.items() if r.on and r.explicit]
        too_few = tokens.row_range(self._boundaries, index)[1] < (request.config.sp_min_token_num or 1)
        later = _SHARDED_FUSIONS if request.fusions["enable_sp"].on and too_few else ()
        empty = [name for name in asked if name not in later and not report.count(name)]
        if empty or (not asked and not any(report.count(name) for name in request.fusions)):
            names = ", ".join(empty) or "any fusion"
            raise StrictError(f"strict: no site of this model was fused by {names}\n{report}")
        self._checked_strictly = not any(name in later for name in asked)


def applied_to(model: torch.nn.Module) -> AppliedModel | None:
    """What stands in front of the model; None: nothing does."""
    found = getattr(model, "_compiled_call_impl", None)
    return found if isinstance(found, AppliedModel) else None


def _lives(reference: weakref.ref[dist.ProcessGroup]) -> bool:
    group = reference()
    return group is not None and groups.exists(group)


def _weakly(applied: AppliedModel, variant: str) -> Callable[[str, str, bool], bool]:
    """``applied._agree`` for a backend, which Dynamo keeps for ever, and with it whatever it holds."""
    reference = weakref.ref(applied)

    def agree(group_name: str, digest: str, training: bool) -> bool:
        found = reference()
        assert found is not None, "a model compiles only while it is called"
        return found._agree(variant, group_name, digest, training)

    return agree


def _ours(error: BaseException) -> TpfuseError | None:
    """The tpfuse error inside a compiler's."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, TpfuseError):
            return current
        seen.add(id(current))
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return None
