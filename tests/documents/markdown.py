"""What the documents hold: fenced blocks with their marks, links and anchors. Pure text, no torch.

A block's mark is an HTML comment on the line before its fence:

    <!-- run -->                  its commands are executed, in order with the Python blocks of the document
    <!-- run after COMMAND -->    likewise, after a command that makes what they need
    <!-- not run: the reason -->  a Python block that is compiled and not executed
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {ROOT / "docs" / "api.md"}
SHELLS = ("sh", "bash", "console")

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)")
_MARK = re.compile(r"^\s*<!--\s*(run|not run:\s*\S.*?)\s*-->\s*$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_SOURCE = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text and its mark ("" for none)."""

    path: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        """Returns the document and line of the block's first line of text."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Tells whether the test executes the block."""
        if self.language == "python":
            return not self.mark.startswith("not run")
        return self.language in SHELLS and (self.mark == "run" or bool(self.before))

    @property
    def before(self) -> str:
        """Returns the command that makes what the block's commands need, as its mark `run after COMMAND` says."""
        return self.mark.removeprefix("run after ") if self.mark.startswith("run after ") else ""


def documents() -> list[Path]:
    """Returns the documents whose blocks are checked: the READMEs and everything in docs but what is generated."""
    found = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path not in GENERATED]


def linking_documents() -> list[Path]:
    """Returns the documents whose links are checked: also those that are generated, and those beside the code."""
    found = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
    return sorted(found | set((ROOT / "tests").rglob("*.md")))


def read_blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a document in order."""
    blocks: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        indent, ticks, language = fence.groups()
        end = at + 1
        while end < len(lines) and not re.fullmatch(rf"\s*{ticks[0]}{{{len(ticks)},}}\s*", lines[end]):
            end += 1
        mark = _MARK.match(lines[at - 1]) if at else None
        text = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        blocks.append(Block(path, at + 2, language, text, mark[1] if mark else ""))
        at = end + 1
    return blocks


def prose(path: Path) -> str:
    """Returns the document without its fenced blocks, comments and code spans."""
    kept, fence = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = _FENCE.match(line)
        if fence:
            fence = "" if line.strip().startswith(fence) and not line.strip().strip(fence[0]) else fence
        elif found:
            fence = found[2]
        else:
            kept.append(line)
    text = re.sub(r"<!--.*?-->", "", "\n".join(kept), flags=re.DOTALL)
    return text


def tables(path: Path, heading: str = "") -> list[list[list[str]]]:
    """Returns the tables of a document as rows of cells, the head first; of one section if a heading is given."""
    text = prose(path)
    if heading:
        found = re.search(rf"^(#+) {re.escape(heading)}$(.*?)(?=^#{{1,6}} |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        assert found is not None, f"{path}: no heading {heading!r}"
        text = found[2]
    tables: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if cells and not inside:
            tables.append([])
        inside = bool(cells)
        if cells and not re.fullmatch(r"[|\s:-]+", line):
            tables[-1].append(cells)
    return tables


def links(path: Path) -> list[str]:
    """Returns the targets of a document's links and pictures, those in code spans left out."""
    text = re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", prose(path))
    return [*_LINK.findall(text), *_SOURCE.findall(text)]


def anchors(path: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    text = prose(path)
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", text, flags=re.MULTILINE):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found | set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))
