"""Write docs/api.md and the tables of docs/support_matrix.md from the code. Run it after a public name or a kernel changed.

python docs/generate.py            write
python docs/generate.py --check    status 1 and the names of the files that are out of date; writes nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpfuse import cli, tables
from tpfuse.comm.arena import DEFAULT_BYTES, layout
from tpfuse.config import FUSION_LEVELS
from tpfuse.graph import pipeline
from tpfuse.kernels.candidates import ALL_REDUCE_RMS_NORM_QUANTIZE_FP8 as FP8_OP
from tpfuse.kernels.candidates import CANDIDATES, NOT_PREPARED, Problem
from tpfuse.kernels.fp8 import Quantisation
from tpfuse.kernels.matmul_candidates import MATMULS, MatmulProblem, table_name
from tpfuse.ops import Recipe

FOLDER = pathlib.Path(__file__).resolve().parent
MODULES = ("tpfuse", "tpfuse.ops", "tpfuse.testing")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in documents().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(documents()[path], encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parent)}: {'out of date, run python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


def documents() -> dict[pathlib.Path, str]:
    """What each generated file has to hold."""
    matrix = FOLDER / "support_matrix.md"
    text = matrix.read_text(encoding="utf-8")
    for name, table in {"fusions": fusions(), "kernels": kernels(), "tables": shipped_tables()}.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        text = re.sub(f"(?s){begin}.*?{end}", lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", text)  # type: ignore[misc]
    return {matrix: text, FOLDER / "api.md": api()}


# -- API reference -----------------------------------------------------------------------------------------------------


def api() -> str:
    """docs/api.md: every public name with its signature and docstring."""
    parts = ["# API reference", "Made from the docstrings by `docs/generate.py`; change those, not this file."]
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts += [f"## `{module_name}`", inspect.getdoc(module) or ""]
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not isinstance(value, (types.ModuleType, str)):
                parts.append("\n\n".join(_entry(f"{module_name}.{name}", value)))
    parts += ["## Command line", f"```text\n{cli.USAGE.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`"
    if not inspect.isclass(value):
        yield _block(_signature(name, value), value)
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield _block(f"class {name}" + (f"({bases})" if bases else ""), value, _fields(value))
    for method, function in vars(value).items():
        plain = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
        if not method.startswith("_") and inspect.isfunction(plain) and plain.__doc__:
            yield _block(_signature(f"{name}.{method}", plain), plain)


def _block(head: str, value: Any, fields: str = "") -> str:
    own = value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")
    documentation = inspect.cleandoc(own or "")
    if dataclasses.is_dataclass(value) and documentation.startswith(f"{getattr(value, '__name__', '')}("):
        documentation = ""  # what dataclass makes up
    body = "\n\n".join(part for part in (head, documentation, fields) if part)
    return f"```text\n{body}\n```"


def _fields(value: type) -> str:
    """The fields of a dataclass with their types and defaults, one a line."""
    if not dataclasses.is_dataclass(value):
        return ""
    lines = []
    for field in dataclasses.fields(value):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        lines.append(f"{field.name}: {field.type}{default}")
    return "\n".join(lines)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """As it is written: annotations are texts here, which ``str(signature)`` would quote, differently by version."""
    signature = inspect.signature(function)
    parts, kinds = [], inspect.Parameter
    before = None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            parts.append("*")
        before = parameter.kind
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation is kinds.empty else f": {_told(parameter.annotation)}"
        equals = " = " if annotation else "="
        default = "" if parameter.default is kinds.empty else f"{equals}{_told_default(parameter.default)}"
        parts.append(f"{star}{parameter.name}{annotation}{default}")
    returns = "" if signature.return_annotation is kinds.empty else f" -> {_told(signature.return_annotation)}"
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _told(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _told_default(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


# -- support matrix ----------------------------------------------------------------------------------------------------


def fusions() -> str:
    """Every fusion of FusionConfig, and whether this version has it."""
    rows = ["| field | what a site becomes | on by itself |", "|---|---|---|"]
    for name, level in FUSION_LEVELS.items():
        missing, by_name = pipeline.unavailable().get(name), pipeline.BY_NAME_ONLY.get(name)
        on = "no: not available" if missing else f"no: {by_name}" if by_name else f"from level O{level}"
        rows.append(f"| `{name}` | {missing or f'`{pipeline.OPS[name]}`'} | {on} |")
    return "\n".join(rows)


def kernels() -> str:
    """Every kernel, the dtypes it can do, and whether a table that ships chooses it."""
    chosen = {(op, name) for table in _tables() for op in table.ops for name in table.candidates(op)}
    rows = ["| operation | kernel | dtypes | chosen by a table that ships |", "|---|---|---|---|"]
    for op, name, dtypes in _kernels():
        # An operation's names in a table differ by dtype; a plain one stands for bf16 and fp16.
        by = [d for d in dtypes if (table_name(op, DTYPES[d]) if op in MATMULS else op, name) in chosen]
        rows.append(f"| `{op}` | `{name}` | {', '.join(dtypes) or 'none'} | {', '.join(by) or 'no'} |")
    return "\n".join(rows)


def shipped_tables() -> str:
    """What was measured for the tables that ship."""
    rows = ["| machine | measured with | operations |", "|---|---|---|"]
    for table in _tables():
        versions = ", ".join(f"{name} {version}" for name, version in sorted(table.versions.items()))
        rows.append(f"| {table.machine} | {versions} | {', '.join(f'`{op}`' for op in sorted(table.ops))} |")
    return "\n".join(rows)


def _tables() -> list[tables.Table]:
    files = sorted(pathlib.Path(tables.__file__).parent.glob("*.json"))
    return [tables.parse(path.read_text(encoding="utf-8"), path.name) for path in files]


def _kernels() -> Iterator[tuple[str, str, list[str]]]:
    """(operation, kernel, dtypes of a usual size that it has nothing against, on two ranks)."""
    split, ring = layout(DEFAULT_BYTES, 2)
    facts = {"world": 2, "rank": 0, "split": split, "ring": ring, "bytes": DEFAULT_BYTES, "workspace": None}
    arena: Any = type("Arena", (), facts)()  # all that a candidate looks at before its memory is made
    per_row = Quantisation(torch.float8_e4m3fn, False, Recipe(group=4096).arguments)
    for op, candidates in CANDIDATES.items():
        for name, candidate in candidates.items():
            problems = {
                key: Problem(op, 16, 4096, dtype, weight_dtype=dtype, fp8=per_row if op == FP8_OP else None)
                for key, dtype in DTYPES.items()
                if key != "fp8"
            }
            yield op, name, [key for key, p in problems.items() if candidate.cannot(arena, p) in ("", NOT_PREPARED)]
    for op, matmuls in MATMULS.items():
        for name, matmul in matmuls.items():
            found = []
            for key, dtype in DTYPES.items():
                out = torch.bfloat16 if key == "fp8" else None
                problem = MatmulProblem(op, 2048, (4096,), 4096, (dtype, dtype), 1024, out)
                if matmul.cannot(arena, problem, tables.Choice(name)) in ("", NOT_PREPARED):
                    found.append(key)
            yield op, name, found


if __name__ == "__main__":
    sys.exit(main())
