"""What tpfuse did: one ``Site`` per place in the model and outcome, a ``Report`` of them, and the table it prints.

Passes write to a ``Recorder``; users read a ``Report``. A place that is compiled more than once (another shape, another
token range, a second process) is still one place: sites are a set, never a count of events.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Set
from typing import Any, Literal

from tpfuse.config import Resolved
from tpfuse.logs import logger

Outcome = Literal["fused", "merged", "skipped"]
_log = logger(__name__)


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the model and what became of it.

    fusion   the field of FusionConfig that governs it ("fuse_allreduce_rms")
    outcome  "fused", "merged" (into another collective, which has its own site) or "skipped"
    reason   why it was skipped, or what it was merged into; empty for a fused site
    where    module path ("model.layers.0.self_attn.o_proj") or file:line
    op       what stands there: "all_reduce", or a norm that no all-reduce could be fused with
    group    name of the process group, empty for norms
    kernel   what runs there: kernels' names (the size of a call decides), "reference" on the CPU; for a skipped all-reduce,
             what does it instead of NCCL; else empty
    variant  range of row counts that this decision holds for ("all", "rows<256", ...)
    """

    fusion: str
    outcome: Outcome
    reason: str
    where: str
    op: str
    group: str = ""
    kernel: str = ""
    variant: str = "all"


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of ``tpfuse.explain``.

    sites         every all-reduce of the model, and every norm that stayed as it was, in order of first appearance
    notes         what holds for the whole model: no tensor-parallel group, fusions that are off
    fusions       per field of FusionConfig: on or off, and why
    graphs        graphs seen so far (recompilations and graph breaks included)
    pass_seconds  time spent in tpfuse's passes over all those graphs
    compile_seconds  by variant: time in the compiler behind Dynamo, the passes included
    """

    sites: tuple[Site, ...]
    notes: tuple[str, ...]
    fusions: Mapping[str, Resolved]
    graphs: int
    pass_seconds: float
    compile_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def count(self, fusion: str, outcome: Outcome = "fused") -> int:
        """Distinct places of the model with that outcome, however often they were compiled."""
        return len({site.where for site in self.sites if site.fusion == fusion and site.outcome == outcome})

    def to_dict(self) -> dict[str, Any]:
        """Everything in it, as JSON can write it."""
        return dataclasses.asdict(
            dataclasses.replace(self, fusions=dict(self.fusions), compile_seconds=dict(self.compile_seconds))
        )

    def to_json(self, indent: int | None = 2) -> str:
        """``to_dict`` as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return "\n".join(_table(self))


#: What follows the module's path in ``Site.where``.
_AT = re.compile(r"( \(backward\))?(#\d+)?$")


class Recorder:
    """Collects what the passes decide about one applied model. Shared by all its graphs and variants."""

    def __init__(self, fusions: Mapping[str, Resolved]) -> None:
        self.fusions = dict(fusions)
        self.graphs = 0
        self.pass_seconds = 0.0
        self.compile_seconds: dict[str, float] = {}
        self._sites: dict[Site, None] = {}
        self._notes: dict[str, None] = {}

    def site(self, site: Site) -> None:
        if site not in self._sites:
            self._sites[site] = None
            told = "; by ".join(text for text in (site.reason, site.kernel) if text)
            _log.debug("%s at %s (rows: %s) %s: %s", site.op, site.where, site.variant, site.outcome, told)

    def withdraw(self, variant: str) -> None:
        """Drop what was decided for a variant: it does not run."""
        self._sites = {site: None for site in self._sites if site.variant != variant}

    def restart(self) -> None:
        """Drop what was decided for all variants: none of them runs any more."""
        self._sites.clear()
        self.graphs = 0

    def forget(self, paths: Set[str]) -> None:
        """Drop what was decided at these modules: the model has others there now."""
        kept = {site: None for site in self._sites if _AT.sub("", site.where) not in paths}
        if len(kept) < len(self._sites):
            self._sites = kept
            self.note("modules were replaced after apply: what was decided at those before is left out")

    def note(self, text: str, level: int = logging.DEBUG) -> None:
        if text not in self._notes:
            self._notes[text] = None
            _log.log(level, "%s", text)

    def warn(self, text: str) -> None:
        """A note on what costs speed."""
        self.note(text, logging.WARNING)

    def report(self) -> Report:
        seconds = self.pass_seconds, dict(self.compile_seconds)
        return Report(tuple(self._sites), tuple(self._notes), dict(self.fusions), self.graphs, *seconds)


def _outcomes(report: Report) -> dict[str, set[str]]:
    """What became of the all-reduce at each place, over all graphs: what one fusion left, another may have taken."""
    found: dict[str, dict[str, set[str]]] = {}
    for s in report.sites:
        if s.op == "all_reduce":
            found.setdefault(s.where, {}).setdefault(s.fusion, set()).add(s.outcome)
    return {
        where: next(({o} for o in ("fused", "merged") if {o} in by_fusion.values()), set().union(*by_fusion.values()))
        for where, by_fusion in found.items()
    }


def any_layer(text: str) -> str:
    """The text with "*" for the numbers of layers in module paths."""
    return re.sub(r"\.\d+(?=[.# ]|$)", ".*", text)


def _table(report: Report) -> list[str]:
    """Lines of the printed report: sites that differ only in a layer's number share a row."""
    rows: dict[tuple[str, ...], set[str]] = {}
    for s in report.sites:
        where, reason = any_layer(s.where), any_layer(s.reason)
        told = "; by ".join(text for text in (reason, s.kernel) if text)
        rows.setdefault((where, s.op, s.outcome, told, s.group, s.variant), set()).add(s.where)
    head = ("where", "op", "outcome", "kernel or reason", "group", "rows", "sites")
    cells = [head, *((*row, str(len(wheres))) for row, wheres in rows.items())]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    places = _outcomes(report)
    fused, merged, left = (sum(outcomes == {o} for outcomes in places.values()) for o in ("fused", "merged", "skipped"))
    mixed = len(places) - fused - merged - left
    total = f"all-reduces: {fused} fused, {merged} merged, {left} left" + (
        f", {mixed} only in some graphs" if mixed else ""
    )
    compiled = f"{report.graphs} graph(s), {report.pass_seconds:.2f} s in tpfuse's passes"
    if len(report.compile_seconds) > 1:
        each = (f"{name} {seconds:.1f} s" for name, seconds in report.compile_seconds.items())
        compiled += f"; compiled: {', '.join(each)}"
    off: dict[str, list[str]] = {}
    for name, fusion in report.fusions.items():
        if not fusion.on:
            off.setdefault(fusion.reason, []).append(name)
    notes = [*report.notes, *(f"off, {reason}: {', '.join(names)}" for reason, names in off.items())]
    nothing = "no all-reduce seen"
    if report.fusions and not any(fusion.on for fusion in report.fusions.values()):
        nothing += ": all fusions are off"
    elif not report.graphs:
        nothing += ": no call was compiled yet, or only inside another torch.compile (apply the outermost module)"
    return [*(lines if report.sites else [nothing]), f"{total}; {compiled}", *notes]
