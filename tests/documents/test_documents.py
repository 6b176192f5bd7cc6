"""The documents keep their word: their programs run, their commands are understood, their links lead somewhere."""

import ast
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.documents.commands import fault_of, read_commands
from tests.documents.markdown import (
    ROOT,
    SHELLS,
    Block,
    anchors,
    documents,
    linking_documents,
    links,
    prose,
    read_blocks,
)
from tests.process.zygote import run_python

DOCUMENTS = documents()
BLOCKS = [block for path in DOCUMENTS for block in read_blocks(path)]
LANGUAGES = {"", "text", "json", "python", *SHELLS}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if any(b.is_run for b in read_blocks(p))], ids=name)
def test_every_program_and_marked_command_of_a_document_runs(path: Path) -> None:
    paths = [str(path)]
    command = [sys.executable, "-m", "tests.documents.play", *paths]
    done = run_python(command, os.environ, timeout_s=390, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    played = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["document"] for each in played] == paths
    failures = [failure for each in played for failure in each["failures"]]
    assert not failures, "\n\n".join(failures)


def test_python_blocks_compile() -> None:
    faults = []
    for block in BLOCKS:
        if block.language == "python":
            try:
                compile(block.text, block.where, "exec")
            except SyntaxError as error:
                faults.append(f"{block.where}: {error}")
    assert not faults, "\n".join(faults)


def test_commands_are_understood_by_the_real_command_line() -> None:
    commands = [command for block in BLOCKS if block.language in SHELLS for command in _located(block)]
    assert len(commands) > 30
    faults = [f"{where}: {' '.join(words)}: {fault}" for where, words in commands if (fault := fault_of(words))]
    assert not faults, "\n".join(faults)


def _located(block: Block) -> list[tuple[str, list[str]]]:
    return [(f"{name(block.path)}:{line}", words) for line, words in read_commands(block)]


def test_a_fault_in_a_command_is_found() -> None:
    assert "trian" in fault_of(["torchquorum", "trian"])
    assert "--rul" in fault_of(["torchquorum", "train", "--rul", "sync"])
    assert "no target tran" in fault_of(["make", "tran"])
    assert "there is no examples/nothing.py" in fault_of(["python", "examples/nothing.py"])
    assert "no flag --step" in fault_of(["torchquorum", "run", "examples/mnist/train_quorum.py", "--step=3"])
    assert fault_of(["torchquorum", "train", "--steps", "3"]) == ""


def test_every_block_has_a_language_that_says_how_it_is_checked() -> None:
    odd = [f"{block.where}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES]
    assert not odd, f"the languages are {sorted(LANGUAGES)}: " + "; ".join(odd)


@pytest.mark.parametrize("path", linking_documents(), ids=name)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    dead = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / unquote(target)).resolve() if target else path
        if not file.exists() or not file.is_relative_to(ROOT):
            dead.append(link)
        elif anchor and file.suffix == ".md" and unquote(anchor) not in anchors(file):
            dead.append(f"{link} (no such heading)")
    assert not dead, f"{name(path)}: {dead}"


def test_programs_named_in_a_document_exist() -> None:
    folders = ("src", "tests", "tools", "benchmarks", "examples", "docs")
    there = [f"/{name(path)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # `script.py` is the reader's own, and coverage.py a tool. Those of the tutorials are not ours.
    others = {"script.py", "coverage.py"}
    pages = [page for page in linking_documents() if page.parent.name != "adr" and page.name != "CHANGELOG.md"]
    gone = []
    for page in pages:
        named = {word.removeprefix("../") for word in re.findall(r"[\w/.-]*\w\.py\b", page.read_text(encoding="utf-8"))}
        missing = [word for word in named - others if not any(path.endswith(f"/{word}") for path in there)]
        gone += [f"{name(page)}: {word}" for word in missing if not re.match(r"gpu_test\d|ch-15_|dist_tf_", word)]
    assert not gone


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readme_has_picture_and_two_commands_by_line_25(readme: str) -> None:
    head = (ROOT / readme).read_text(encoding="utf-8").splitlines()[:25]
    assert any(line.startswith("![") for line in head)
    assert [line.split()[:2] for line in head if line.startswith("make ")] == [["make", "train"], ["make", "test"]]
    other = {"README.md": "README.zh-CN.md", "README.zh-CN.md": "README.md"}[readme]
    assert f"({other})" in "\n".join(head)


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readme_is_short_and_says_what_the_secret_does(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170
    assert "(SECURITY.md)" in text and "torchquorum secret" in text and "TLS 1.3" in text


def test_every_document_is_in_the_index() -> None:
    pages = {path for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert not pages - linked, f"{name(index)} does not link {sorted(map(name, pages - linked))}"


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    texts = _texts_of_the_program()
    unknown = []
    for block in read_blocks(ROOT / "docs" / "troubleshooting.md"):
        if block.language == "text":
            for line in filter(None, block.text.splitlines()):
                if not any(text.search(line) for text in texts):
                    unknown.append(f"{block.where}: {line}")
    assert not unknown, "no such text in the sources:\n" + "\n".join(unknown)


def _texts_of_the_program() -> list[re.Pattern[str]]:
    """Returns the longer texts in the sources, with anything in place of what is filled in."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts: list[ast.expr] = node.values if isinstance(node, ast.JoinedStr) else [node]  # type: ignore[list-item]
            words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            literal = "".join(word for word in words if isinstance(word, str))
            if len(literal) >= 20:
                found.add("".join(".*" if word is None else re.escape(str(word)) for word in words))
    return [re.compile(text) for text in found]


def test_prose_leaves_out_blocks_and_comments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b_c `d`!\n<!-- [x](gone.md) -->\n```sh\n[y](gone.md)\n```\nsee [z](#a-b_c-d) and `[no](no.md)`\n"
    )
    assert "gone" not in prose(page)
    assert links(page) == ["#a-b_c-d"]
    assert anchors(page) == {"a-b_c-d"}
