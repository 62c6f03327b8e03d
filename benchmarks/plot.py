"""Plots of a results file: time over message size, of GEMMs over rows, on log scales, of stacks of layers as a share of
plain compile's; one picture per operation, the limit drawn in.

    python benchmarks/plot.py benchmarks/results/sweep_all_reduce_rms_norm.csv

Needs matplotlib. Each picture lies beside the file, under its name and the operation's.
"""

from __future__ import annotations

import csv
import pathlib
import sys
from typing import Any

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LIMIT, STACK = "limit", "layer_stack"


def plot(path: str | pathlib.Path) -> list[pathlib.Path]:
    """Draw the file; the pictures' paths. Raises ModuleNotFoundError: no matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    path = pathlib.Path(path)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    pictures = []
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        panels = list(dict.fromkeys(_panel(row) for row in of_op))
        across = min(3, len(panels))
        down = -(-len(panels) // across)
        figure, axes = pyplot.subplots(down, across, figsize=(5.5 * across, 4.2 * down), squeeze=False)
        for panel, axis in zip(panels, axes.flat, strict=False):
            _draw(axis, panel, [row for row in of_op if _panel(row) == panel])
        for axis in list(axes.flat)[len(panels) :]:
            axis.axis("off")
        first = of_op[0]
        figure.suptitle(f"{op}, {first['world']} x {first['gpu']}, torch {first['torch']}, commit {first['commit']}")
        figure.tight_layout()
        picture = path.with_name(f"{path.stem}_{op}.png" if op not in path.stem else f"{path.stem}.png")
        figure.savefig(picture, dpi=120)
        pyplot.close(figure)
        pictures.append(picture)
    return pictures


def _panel(row: dict[str, str]) -> str:
    if "m" in row:
        return f"N = {row['n']}, K = {row['k']} on a rank, {row['dtype']}"
    if row["op"] == STACK:
        return f"{row['layers']} layers of {row['model']}, {row['style']}, {row['mode']}, {row['dtype']}"
    return f"{row['dtype']}" if row["op"] == "all_reduce" else f"hidden {row['hidden']}, {row['dtype']}"


def _draw(axis: Any, panel: str, rows: list[dict[str, str]]) -> None:
    stack, gemm = rows[0]["op"] == STACK, "m" in rows[0]
    plain = {row["rows"]: float(row["us"]) for row in rows if stack and row["candidate"] == "plain"}
    for candidate in dict.fromkeys(row["candidate"] for row in rows):
        mine = [row for row in rows if row["candidate"] == candidate]
        points = sorted((_place(row), float(row["us"]) / (plain[row["rows"]] if stack else 1)) for row in mine)
        points = [(x, y) for x, y in points if y > 0]
        style = {"color": "black", "linestyle": "--"} if candidate == LIMIT else {"marker": ".", "linewidth": 1}
        if points:
            axis.plot(*zip(*points, strict=True), label=candidate, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("linear" if stack else "log")
    axis.set_title(panel)
    axis.set_xlabel("rows" if gemm or stack else "KiB summed on each rank")
    axis.set_ylabel("of the time of plain torch.compile" if stack else "us" if gemm else "us added to a GEMM")
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(fontsize=7)


def _place(row: dict[str, str]) -> float:
    """On the x axis."""
    if "m" in row:
        return float(row["m"])
    if row["op"] == STACK:
        return float(row["rows"])
    return int(row["rows"]) * int(row["hidden"]) * ITEM_BYTES[row["dtype"]] / 1024


def try_to_plot(path: str | pathlib.Path) -> str:
    """What became of it, in words."""
    try:
        return f"drawn: {', '.join(str(picture) for picture in plot(path))}"
    except ModuleNotFoundError:
        return f"not drawn, there is no matplotlib here: python benchmarks/plot.py {path}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*plot(sys.argv[1]), sep="\n")
