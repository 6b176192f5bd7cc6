"""Lays out the documents for mkdocs: every page of the repository at its place, and the files that they link to.

Called by `make docs`. The links between pages stay as they are on disk, so mkdocs checks the same links that readers of the files follow.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "site-source"
LINK = re.compile(r"\]\(([^)#\s]+)")
FOLDER = re.compile(r"\]\(((?:\.\./)*[\w/-]+)/?\)")
LEFT_OUT = ("tests/", ".github/")


def pages() -> list[Path]:
    """Returns the Markdown files that people read, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split() if not name.startswith(LEFT_OUT)]


def linked(page: Path) -> set[Path]:
    """Returns the files that a page links to, relative to the root."""
    found = set()
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (ROOT / page.parent / target).resolve()
        if file.is_file() and file.is_relative_to(ROOT):
            found.add(file.relative_to(ROOT))
    return found


def main() -> None:
    """Copies them."""
    shutil.rmtree(TARGET, ignore_errors=True)
    known = pages()
    for file in {*known, *(file for page in known for file in linked(page))}:
        place = TARGET / file
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            # mkdocs knows no folder as a target: such a link leads to the folder's page on the site.
            place.write_text(
                FOLDER.sub(partial(folder_link, file), (ROOT / file).read_text(encoding="utf-8")), encoding="utf-8"
            )
        else:
            shutil.copyfile(ROOT / file, place)
    print(f"laid out {len(known)} pages in {TARGET.relative_to(ROOT)}")


def folder_link(page: Path, match: re.Match[str]) -> str:
    """Returns a link to a folder as one to its page, or as plain words if it has none."""
    folder = ROOT / page.parent / match[1]
    if not folder.is_dir():
        return match[0]
    return f"]({match[1]}/README.md)" if (folder / "README.md").is_file() else "]"


if __name__ == "__main__":
    main()
