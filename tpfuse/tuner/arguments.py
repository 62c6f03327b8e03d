"""The command line of ``tpfuse tune``."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpfuse.kernels.candidates import ALL_REDUCE, ALL_REDUCE_RMS_NORM, CANDIDATES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HIDDEN = (4096, 8192)
ROWS = tuple(1 << n for n in range(14))  # 1 to 8192
OPS = (ALL_REDUCE_RMS_NORM, ALL_REDUCE)
SECONDS = 600


def parse(
    argv: Sequence[str] | None = None, prog: str = "tpfuse.tuner", parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.Namespace:
    """Arguments of the tuner; a bad one ends the process with status 2 before any rank does any work."""
    parser = argparse.ArgumentParser(
        prog=prog,
        parents=list(parents),
        allow_abbrev=False,
        description="Measure which kernel is the fastest for which size on this machine, and keep the answer.",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--hidden", type=counts, default=HIDDEN, metavar="N,N", help=f"hidden sizes (default: {_listed(HIDDEN)})"
    )
    sizes.add_argument("--model", metavar="FOLDER", help="take the hidden size from the config.json in this folder")
    parser.add_argument("--rows", type=counts, default=ROWS, metavar="N,N", help=f"rows (default: {_listed(ROWS)})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument(
        "--ops", type=operations, default=OPS, metavar="OP,OP", help=f"operations (default: {_listed(OPS)})"
    )
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=SECONDS,
        metavar="BUDGET",
        help=f"start no new size after so long; coarse sizes come first (default: {SECONDS})",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="where to write, or the folder (default: the cache, where it is found)",
    )
    parser.add_argument(
        "--libraries",
        action="store_true",
        help="measure, and choose, other libraries' kernels too that need memory of their own",
    )
    parser.add_argument("--fresh", action="store_true", help="forget row sizes that were tuned before")
    parser.add_argument("--verbose", action="store_true", help="print what every candidate took")
    args = parser.parse_args(argv)
    if args.model is not None:
        try:
            args.hidden = (hidden_size(args.model),)
        except ValueError as error:
            parser.error(f"--model: {error}")
    return args


def hidden_size(folder: str) -> int:
    """The hidden size in a checkpoint folder's config.json. Raises ValueError: there is none."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    text = config.get("text_config") if isinstance(config, dict) else None
    for each in (config, text):
        found = each.get("hidden_size") if isinstance(each, dict) else None
        if type(found) is int and found > 0:
            return found
    raise ValueError(f"{path} has no hidden_size")


def counts(text: str) -> tuple[int, ...]:
    """Positive whole numbers between commas, ascending and each once."""
    return tuple(sorted({_positive(int)(part) for part in text.split(",")}))


def operations(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CANDIDATES:
            raise argparse.ArgumentTypeError(f"no operation {name!r}; there are {', '.join(CANDIDATES)}")
    return names


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not number > 0:  # NaN too
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return number

    return read


positive = _positive(int)


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))
