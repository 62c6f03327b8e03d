"""The compiler behind ``apply`` and ``torch.compile(backend="tpfuse")``: Inductor, with our passes in front of it.

The passes run as the first of Inductor's passes over what AOTAutograd has traced: the graph of inference, or the joint
graph of forward and backward, before that is split. So they run before Inductor's FxGraphCache computes its key, in every
process and on every rank, warm cache or cold, and what they decided is part of the key. For that AOTAutograd's own cache,
which would skip them altogether, is off for these graphs. A user's ``joint_custom_pre_pass`` runs before, all others of the
user's after them.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import _disable_current_modes

from tpfuse.comm import agreement, groups
from tpfuse.config import DISABLE_VARIABLE, FusionConfig, Resolved, is_disabled
from tpfuse.errors import ConfigError
from tpfuse.graph import joint, pipeline
from tpfuse.graph.context import FUSION, GEMM_COMMS, SEQUENCE_PARALLEL, Context
from tpfuse.graph.places import Places
from tpfuse.graph.provenance import Provenance
from tpfuse.graph.replicated import unlike, weights
from tpfuse.graph.shadow import BACKWARD, FORWARD, WHOLE
from tpfuse.graph.verify import Verification
from tpfuse.kernels import dispatch
from tpfuse.kernels.candidates import BATCH_INVARIANT, Wish
from tpfuse.logs import logger
from tpfuse.report import Recorder
from tpfuse.tokens import MOST_ROWS
from tpfuse.version import __version__

#: Inductor's option for a pass before its own: these pad GEMMs by what they measure, on each rank for itself.
_FIRST_PASS = "joint_custom_pre_pass"
_REWRITTEN = "tpfuse_rewritten"
_log = logger(__name__)


class TpfuseBackend:
    """A ``torch.compile`` backend for one variant of one model.

    fusions   what is on and off
    recorder  where decisions go
    variant   name of the row-count range that this instance compiles for
    rows      the fewest and the most rows in it
    places    finds places in the model that the graphs are of; None: as the graphs tell them
    agree     called with the name of each process group in a graph, a digest of the graph, and whether it is one of
              training, before it is rewritten; returns whether the group's ranks are alike, the same answer on each of them
    config    sizes, time-outs and kernels that were asked for
    verify    of which calls of a graph values are compared with the graph as it was: the first, and each so many later;
              0: of none
    mode, options, dynamic  as for torch.compile's "inductor" backend
    """

    #: What compiles a graph after the passes. Tests that only look at graphs replace it by an interpreter.
    codegen: Callable | None = None

    def __init__(
        self,
        fusions: Mapping[str, Resolved],
        recorder: Recorder,
        *,
        variant: str = "all",
        rows: tuple[int, int] = (1, MOST_ROWS),
        places: Places | None = None,
        agree: Callable[[str, str, bool], bool] | None = None,
        config: FusionConfig | None = None,
        verify: int = 0,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> None:
        self.fusions, self.recorder, self.variant, self.agree = fusions, recorder, variant, agree
        self.places = places or Places(None)
        self.config, self.rows, self.verify = config or FusionConfig(), rows, verify
        self.inductor = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        self._compiling = variant  # of the graph that is being compiled: the variant, and whether it trains
        self._inputs: list[Any] = []  # of the graph that is being compiled, where known
        self._verification: Verification | None = None  # of the same

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        config: Any = torch.compiler.config  # it installs its methods at run time
        tag = f"{config.cache_key_tag}|tpfuse {__version__}"
        self._inputs = [
            getattr(node.meta.get("grapharg"), "example", None) for node in module.graph.find_nodes(op="placeholder")
        ]
        users = self.inductor.config.get(_FIRST_PASS, inductor_config.joint_custom_pre_pass)
        patches = {**self.inductor.config, _FIRST_PASS: _FirstPass(self, users)}
        start, self._compiling = time.perf_counter(), self.variant
        self.recorder.forget(self.places.refresh())
        inner = functools.partial(self._inner_compile, [])
        try:
            with (
                functorch_config.patch(enable_autograd_cache=False, bundled_autograd_cache=False),
                config.patch(cache_key_tag=tag),
            ):
                return compile_fx(module, example_inputs, inner_compile=inner, config_patches=patches)
        finally:
            self._inputs = []  # a backend lives as long as the process, a model need not
            seconds = self.recorder.compile_seconds
            seconds[self._compiling] = seconds.get(self._compiling, 0.0) + time.perf_counter() - start

    def _inner_compile(
        self, joints: list[Verification], module: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile a graph of inference, or half of a joint graph. joints: its verification, for the other half, which torch
        may compile much later."""
        from torch._inductor.compile_fx import compile_fx_inner

        half = WHOLE
        if not kwargs.get("is_inference"):  # half of what ``rewrite`` has seen as a whole
            half = BACKWARD if kwargs.get("is_backward") else FORWARD
            if not self.recorder.graphs:
                self.recorder.warn(
                    "a training graph was compiled without tpfuse: Inductor's passes over joint graphs are off"
                )
            pipeline.finish(module, half == BACKWARD)
        elif not module.meta.get(_REWRITTEN):
            self.rewrite(module)
        if self._verification is not None:
            if half != WHOLE or self._verification.fits(module):
                joints.append(self._verification)
            else:
                self.recorder.note("verify: a graph is not compared, for its weights were frozen into it")
            self._verification = None
        verified = joints[-1].in_front_of(module, half) if joints else None
        compiled = (type(self).codegen or compile_fx_inner)(module, example_inputs, **kwargs)
        return compiled if verified is None else verified(compiled)

    def rewrite(self, module: torch.fx.GraphModule) -> None:
        """Run the passes over one graph: of inference, or of forward and backward together. Collective."""
        agree = self.agree or (lambda name, digest, training: True)
        names, digest = pipeline.group_names(module.graph, self.fusions), pipeline.digest(module.graph)
        training = joint.is_joint(module.graph)
        answers = [agree(name, digest, training) for name in names]  # all are asked, whatever the first says
        if pipeline.on_cuda(module.graph):
            self._make_arenas(names)
        start = time.perf_counter()
        megabytes = self.config.fi_allreduce_fusion_max_size_mb
        kernel = BATCH_INVARIANT if self.config.batch_invariant else self.config.allreduce_rms_kernel
        wish = Wish(kernel, None if megabytes is None else int(megabytes * 2**20))
        fewest = self.config.sp_min_token_num
        replicated, differing = {}, {}
        asked = [name for name, alike in zip(names, answers, strict=True) if alike]
        if self.fusions[SEQUENCE_PARALLEL].on:
            with _disable_current_modes():
                replicated = {name: weights(module.graph, self._inputs, name) for name in asked}
                differing = {name: unlike(module.graph, self._inputs, name, digest) for name in asked}
        variant = self._compiling = training_variant(self.variant) if training else self.variant
        context = Context(
            self.fusions,
            self.recorder,
            variant,
            self.places,
            all(answers),
            wish,
            self.rows,
            fewest,
            replicated,
            differing,
            self.config.batch_invariant,
            self.config.rope_kvcache_fusion_max_token_num,
        )
        provenance = Provenance(module) if self.verify else None
        with provenance.followed() if provenance else contextlib.nullcontext():
            pipeline.run(module, context)
        if provenance:
            self._verify(Verification(provenance.pair(self.places), names, self.verify, digest if all(answers) else ""))
        self.recorder.graphs += 1
        seconds = time.perf_counter() - start
        self.recorder.pass_seconds += seconds
        _log.info("graph %d (rows: %s): %s; %.2f s", self.recorder.graphs, variant, context.told(), seconds)

    def _verify(self, verification: Verification) -> None:
        self._verification = verification
        self.recorder.note(
            f"verify: the first call of a graph and every {self.verify} later, {verification.compares} comparisons each "
            f"({self._compiling})"
        )

    def _make_arenas(self, group_names: Sequence[str]) -> None:
        """Symmetric memory for the groups of a graph: now, since no kernel can make it later, inside a CUDA graph.

        Collective at a group's first graph. Raises ConfigError, on every rank: a group cannot have what was asked for by
        name.
        """
        named = [fusion for fusion in (FUSION, GEMM_COMMS) if self.fusions[fusion].on]
        for name in group_names if named else ():
            made = dispatch.of(name, int(self.config.workspace_mb * 2**20))
            if isinstance(made, str):
                self.recorder.warn(f"group {name!r} has no symmetric memory: {made}")
                asked = [f"{fusion}=True" for fusion in named if self.fusions[fusion].explicit]
                if groups.size(name) > 1:
                    asked += self.config.asked_of_kernels()
                if asked:
                    raise ConfigError(f"{', '.join(asked)} cannot be honoured: {made}")
                continue
            if self.config.peer_timeout_s is not None:
                made.arena.set_deadline(self.config.peer_timeout_s)
            self.recorder.note(
                f"group {name!r}: arena of {made.arena.bytes >> 20} MiB on each rank; kernels by table, {made.source}"
            )

    def get_compiler_config(self) -> dict[str, Any]:
        """Inductor's configuration with the mode and options given, which torch.compile guards and logs."""
        return self.inductor.get_compiler_config()

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset()``: drop CUDA graphs."""
        self.inductor.reset()


def training_variant(variant: str) -> str:
    """How the report calls a variant's graphs of training."""
    return f"{variant}, training"


class _FirstPass(CustomGraphPass):
    """Our passes over a graph of inference, or the joint graph of a training step, after the user's own pass.

    Not over graphs within it: of what is given to those, nothing is known. What our passes do is in the graphs that
    Inductor compiles, and thus in its cache's key, and so is what the user's does: the identifier says no more.
    """

    def __init__(self, backend: TpfuseBackend, users: Any) -> None:
        several = isinstance(users, (list, tuple))  # from torch 2.13 on
        self._backend, self._users = backend, users if several else [users] if users else []

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self._users:
            each(graph)
        from torch._inductor.fx_passes.post_grad import remove_noop_ops

        module = graph.owning_module
        if module is not None and any(node.op == "placeholder" and "desc" in node.meta for node in graph.nodes):
            remove_noop_ops(graph)  # as Inductor does next: collectives in place leave copies
            self._backend.rewrite(module)
            module.meta[_REWRITTEN] = True

    def uuid(self) -> Any:
        return "tpfuse"


def tpfuse_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """``torch.compile(model, backend="tpfuse")``: the graph fusions at their defaults, without apply's model handling.

    mode and options are those of the "inductor" backend. ``apply`` is the better door: it has a configuration and a
    report, and knows Hugging Face's ``generate``.
    """
    config = FusionConfig(optimization_level=0) if is_disabled() else FusionConfig()
    fusions = pipeline.resolve(config)
    backend = TpfuseBackend(fusions, Recorder(fusions), agree=_agree, mode=mode, options=options)
    return backend(module, example_inputs)


def _agree(group_name: str, digest: str, training: bool) -> bool:
    """Once per group, and once more for training: every rank that compiles with this backend has the same version, on or
    off; whether the same graph."""
    group = groups.resolve(group_name)
    agreed = _agreed.setdefault(group, {})
    if training not in agreed:
        proposal = {"tpfuse": __version__, DISABLE_VARIABLE: str(is_disabled())}
        agreed[training] = agreement.agree(group, 'torch.compile(backend="tpfuse")', proposal, may_differ=digest)
    return agreed[training]


#: Groups may end before the process does.
_agreed: weakref.WeakKeyDictionary[Any, dict[bool, bool]] = weakref.WeakKeyDictionary()
