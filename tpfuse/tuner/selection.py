"""From times to a short table. Pure: what all ranks have the same times for, they choose the same for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from tpfuse.tables import Choice, Entries

#: Microseconds of each choice at one size; more than 0.
Times: TypeAlias = Mapping[Choice, float]

SPREAD = 0.03  # this close to the best after the first pass: the second decides
HYSTERESIS = 0.01  # this close to the best: stay with what is chosen for fewer rows
MOST_FINALISTS = 8


def finalists(times: Times, baseline: Choice) -> list[Choice]:
    """The choices that a second, longer measurement decides between, fastest first; the baseline, if timed, comes along."""
    ranked = sorted(times, key=lambda choice: times[choice])
    close = [choice for choice in ranked if times[choice] <= times[ranked[0]] * (1 + SPREAD)][:MOST_FINALISTS]
    return close + [baseline] * (baseline in times and baseline not in close)


def entries(by_rows: Mapping[int, Times]) -> Entries:
    """The fastest choice from each measured row count on; the one of fewer rows stays while it is as good as the best."""
    found: list[tuple[int, Choice]] = []
    for rows in sorted(by_rows):
        times = by_rows[rows]
        best = min(times, key=lambda choice: times[choice])
        if found and times.get(found[-1][1], math.inf) <= times[best] * (1 + HYSTERESIS):
            continue
        if not found or found[-1][1] != best:
            found.append((rows if found else 1, best))
    return tuple(found)


def told(chosen: Mapping[str, Mapping[int, Entries]], times: Mapping[tuple[str, int, int], Times], baseline: str) -> str:
    """A table of what was chosen, with the time at the ends of each range and how the baseline compares there."""
    heads = ("op", "row bytes", "rows", "kernel", "warps", "blocks", "registers", "us", f"{baseline} us")
    lines: list[tuple[str, ...]] = [heads]
    for op, by_row in chosen.items():
        for row_bytes, listed in by_row.items():
            measured = sorted(rows for o, b, rows in times if (o, b) == (op, row_bytes))
            for index, (start, choice) in enumerate(listed):
                end = listed[index + 1][0] if index + 1 < len(listed) else math.inf
                inside = [rows for rows in measured if start <= rows < end]
                ends = sorted({inside[0], inside[-1]})
                spans = [_span([_time(times[op, row_bytes, r], name) for r in ends]) for name in (choice, Choice(baseline))]
                layout = ["-" if n is None else str(n) for n in (choice.warps, choice.blocks, choice.registers)]
                rows = f"{start}-{int(end) - 1}" if end < math.inf else f"{start}-"
                lines.append((op, str(row_bytes), rows, choice.candidate, *layout, *spans))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _time(times: Times, choice: Choice) -> str:
    return f"{times[choice]:.2f}" if choice in times else "-"


def _span(ends: list[str]) -> str:
    return "..".join(ends)
