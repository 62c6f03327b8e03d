"""The fenced blocks of README.md, CONTRIBUTING.md and docs/."""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)(?P<rest>.*)$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block and where it is. line: of its first line, from 1."""

    path: pathlib.Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: pathlib.Path, language: str | None = None) -> list[Block]:
    """All blocks of a file, or those in one language, in order. Raises ValueError: one does not end."""
    found, begun = [], None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence and begun is None:
            begun = number, fence["language"] + fence["rest"]
        elif fence and begun is not None:
            start, name = begun
            found.append(Block(path, start + 1, name, "\n".join(lines[start : number - 1]) + "\n"))
            begun = None
    if begun is not None:
        raise ValueError(f"{path}:{begun[0]}: a block that does not end")
    return [block for block in found if language in (None, block.language)]


def prose(path: pathlib.Path) -> list[tuple[int, str]]:
    """(number, line) of everything outside of blocks."""
    inside = {b.line + n for b in blocks(path) for n in range(-1, b.text.count("\n") + 1)}
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if number not in inside]


def commands(block: Block) -> list[str]:
    """The commands of a bash block: lines without comments, continued ones joined."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    return [line.partition(" #")[0].strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]
