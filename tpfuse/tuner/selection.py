"""From times to a short table. Pure: what all ranks have the same times for, they choose the same for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from tpfuse import tables
from tpfuse.tables import SHARDED, WHOLE, Choice, Entries, Size

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


def sharding(by_rows: Mapping[int, Times]) -> Entries:
    """Rows are sharded from the fewest on at which that is faster, there and at all larger row counts that were measured.

    Fewer than were measured stay whole.
    """
    whole, sharded = Choice(WHOLE), Choice(SHARDED)
    start = None
    for rows in sorted(by_rows, reverse=True):
        if not by_rows[rows].get(sharded, math.inf) < by_rows[rows][whole]:
            break
        start = rows
    if start is None:
        return ((1, whole),)
    return ((1, sharded),) if start == 1 else ((1, whole), (start, sharded))


def told(chosen: Mapping[str, Mapping[Size, Entries]], times: Mapping[tuple[str, Size, int], Times], baseline: str) -> str:
    """A table of what was chosen, with the time at the ends of each range and how the baseline compares there."""
    heads = ("op", "size", "rows", "kernel", "options", "us", f"{baseline} us")
    lines: list[tuple[str, ...]] = [heads]
    for op, by_size in chosen.items():
        for size, listed in by_size.items():
            measured = sorted(rows for o, s, rows in times if (o, s) == (op, size))
            for index, (start, choice) in enumerate(listed):
                end = listed[index + 1][0] if index + 1 < len(listed) else math.inf
                inside = [rows for rows in measured if start <= rows < end]
                ends = sorted({inside[0], inside[-1]})
                spans = [_span([_time(times[op, size, r], name) for r in ends]) for name in (choice, Choice(baseline))]
                options = ",".join(f"{name}={value}" for name, value in choice.options) or "-"
                rows = f"{start}-{int(end) - 1}" if end < math.inf else f"{start}-"
                lines.append((op, tables.size_name(size), rows, choice.candidate, options, *spans))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _time(times: Times, choice: Choice) -> str:
    return f"{times[choice]:.2f}" if choice in times else "-"


def _span(ends: list[str]) -> str:
    return "..".join(ends)
