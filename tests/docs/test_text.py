"""What the docs say besides their code: generated pages, links, paths, reasons and messages are those of the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re

import pytest

import tpfuse
from tests.docs.blocks import FILES, ROOT, blocks, prose
from tpfuse import errors

LANGUAGES = ("python", "bash", "text", "json")
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
#: Texts in tpfuse/graph that no report shows.
NOT_SHOWN = {
    "a call of a verified graph",
    "nothing more",
    "… …, call …, …",
    "rank …: …",
    "…: differs by …, … times as much as rounding may",
    'File "(?P<file>[^"]+)", line (?P<line>\\d+)',
    "comparing weights",
    "comparing constants",
    "reduce_scatter, all_gather",
    "joined with a GEMM",
    "an input",
    "…, training",
    "graph %d (rows: %s): %s; %.2f s",  # logged
    "nothing to decide",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path):
    for block in blocks(path):
        assert block.language in LANGUAGES, f"{block.where}: {block.language!r}; there are {LANGUAGES}"
        if block.language == "json":
            tpfuse.FusionConfig.from_dict(json.loads(block.text))
    for number, line in prose(path):
        assert not line.startswith("    ") or line.lstrip()[:1] in "-*0123456789|", (
            f"{path.name}:{number}: a block without a fence"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links_and_paths_exist(path):
    """Links to files, and paths of the checkout between backticks."""
    for number, line in prose(path):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", line):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}:{number}: no {target}"
        for text in re.findall(r"`([^`]+)`", line):
            for word in re.findall(r"(?:tests|benchmarks|launch|docs|tpfuse|\.ci)/[\w/.*<>-]+", text):
                if not re.search(r"[*<>]", word):
                    assert (ROOT / word).exists(), f"{path.name}:{number}: no {word}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_exist(path):
    """Names of tpfuse, fields and environment variables that are told of are there."""
    source = "\n".join(each.read_text() for each in (ROOT / "tpfuse").rglob("*.py"))
    text = path.read_text(encoding="utf-8")
    for name in set(re.findall(r"\btpfuse\.(\w+)", text)):
        assert hasattr(tpfuse, name) or importlib.util.find_spec(f"tpfuse.{name}") or name in ("json",), f"no tpfuse.{name}"
    for name in set(re.findall(r"\bTPFUSE_[A-Z_]+", text)):
        assert name in source, f"nothing reads {name}"
    for name in set(re.findall(r"\b(?:fuse|enable)_[a-z_]+\b", text)):
        assert name in source, f"there is no {name}"


def test_generated_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.documents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run python docs/generate.py"
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in tpfuse.__all__:
        assert name in ("ops", "__version__") or f"### `tpfuse.{name}`" in reference


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name})" in readme, path.name


# -- troubleshooting ---------------------------------------------------------------------------------------------------


def texts(folder: str) -> dict[str, str]:
    """Texts of several words in the code, with … for what is filled in -> file."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tpfuse" / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
                text = node.value
            else:
                continue
            if " " in text.strip("…"):
                found[text] = path.name
    return found


def reasons() -> dict[str, str]:
    """Those of the passes, that a report may show: no docstrings, no messages of our own errors."""
    documentation = set()
    for path in (ROOT / "tpfuse" / "graph").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                documentation.add(node.value.value)
            if isinstance(node, (ast.Assert, ast.Raise)):
                documentation |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                documentation |= {
                    "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in n.values)
                    for n in ast.walk(node)
                    if isinstance(n, ast.JoinedStr)
                }
    return {
        text: file
        for text, file in texts("graph").items()
        if text not in documentation | NOT_SHOWN and " " in text.strip("… ")
    }


def test_every_reason_is_explained():
    told = TROUBLESHOOTING.read_text()
    assert len(reasons()) > 50
    missing = {text: file for text, file in reasons().items() if text.strip() not in told}
    assert not missing, "docs/troubleshooting.md does not explain:\n" + "\n".join(f"{f}: {t}" for t, f in missing.items())


def test_every_message_is_one_of_the_code():
    """What the tables quote in their first two columns, … standing for whatever."""
    known = list(texts("."))
    for number, line in prose(TROUBLESHOOTING):
        if not line.startswith("| ") or " | " not in line:
            continue
        cells = line.strip("| ").split(" | ")[:-1]
        for quoted in (text for cell in cells for text in re.findall(r"`([^`]+ [^`]+)`", cell)):
            plain = quoted.strip("… ").removesuffix(": ").strip()
            assert any(plain in text for text in known) or _pieces(quoted, known), (
                f"line {number}: {quoted!r} is in no code"
            )


def _pieces(quoted: str, known: list[str]) -> bool:
    """Whether a text has all of its pieces, in order."""
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in quoted.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in known)


def test_every_error_is_explained():
    told = TROUBLESHOOTING.read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.TpfuseError):
            assert name in told, name
