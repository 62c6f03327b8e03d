"""The demo's command line."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence

import torch

import tpfuse
from tpfuse.graph import pipeline
from tpfuse.models import families

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Dimensions of a mesh of ranks, outermost first: replicas, pipeline stages, tensor parallelism.
DIMENSIONS = ("dp", "pp", "tp")

#: Command line option -> field of the Hugging Face configuration.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def parse(
    argv: Sequence[str] | None = None, prog: str = "tpfuse.demo", parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.Namespace:
    """Arguments of the demo; a bad one ends the process with status 2 before any rank does any work."""
    parser = argparse.ArgumentParser(
        prog=prog,
        parents=list(parents),
        allow_abbrev=False,
        description="Compare a tensor-parallel model before and after tpfuse.apply.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="FOLDER", help="local Hugging Face checkpoint folder")
    what.add_argument(
        "--family",
        choices=families.FAMILIES,
        default="llama",
        metavar="NAME",
        help=f"small random model (default: llama): {', '.join(families.FAMILIES)}",
    )
    for option, field in SIZES.items():
        default = {"layers": 2, "hidden": 256}.get(option)
        told = f"default: {default}" if default else "default: follows from the hidden size"
        told = "default: 128" if option == "vocab" else told
        parser.add_argument(f"--{option.replace('_', '-')}", type=positive, metavar="N", help=f"{field} ({told})")
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="tpNxdpN",
        help="how ranks are laid out: tp2xdp2 (two replicas of two ranks), tp2xpp2 (two pipeline stages); default: all tp",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--new-tokens", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if each local rank has its own GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and the prompt (default: 0)")
    parser.add_argument(
        "--set",
        dest="fields",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="fields of tpfuse.FusionConfig, for example fuse_allreduce_rms=off",
    )
    args = parser.parse_args(argv)
    sized = [f"--{option.replace('_', '-')}" for option in SIZES if getattr(args, option)]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.model and sized:
        parser.error(f"a checkpoint has its own sizes: {', '.join(sized)} cannot go with --model")
    if args.model and not os.path.isdir(args.model):
        parser.error(f"--model: no folder {args.model!r}")
    try:
        pipeline.resolve(tpfuse.FusionConfig.load(args.fields))
    except tpfuse.ConfigError as error:
        parser.error(f"--set: {error}")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def mesh_sizes(text: str) -> dict[str, int]:
    """Sizes of the mesh's dimensions, outermost first, from "tp2xdp2". What is not named has size 1."""
    parts = [re.fullmatch(r"(dp|pp|tp)([1-9]\d*)", part) for part in text.lower().split("x")]
    given = {part[1]: int(part[2]) for part in parts if part}
    if None in parts or len(given) < len(parts):
        raise argparse.ArgumentTypeError(f"must be like tp2, tp2xdp2 or tp2xpp2, got {text!r}")
    return {name: given.get(name, 1) for name in DIMENSIONS}


def ranks(mesh: dict[str, int]) -> int:
    return math.prod(mesh.values())
