"""The commands in the documents' shell blocks: found, and held against the real command line without running it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path

import click

from tests.documents.markdown import ROOT, Block

CLUSTER_FLAGS = {"job-name", "task-id", "task-index", "ps-hosts", "ps-host", "worker-hosts", "transport"}
_PROGRAM = re.compile(r"(?:\S*/)?(torchquorum|python3?|make)")


def read_commands(block: Block) -> list[tuple[int, list[str]]]:
    """Returns the commands of a shell block that are torchquorum's, python's or make's: line and words, program first.

    In a console block commands begin with `$`. What goes before a program (VAR=value, `ip netns exec NAME`, `sudo`) and what
    follows `&`, `|`, `;` or `>` is left out.
    """
    found: list[tuple[int, list[str]]] = []
    lines, number = block.text.splitlines(), 0
    while number < len(lines):
        start, line = number, lines[number]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = line[:-1] + lines[number]
        number += 1
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        for words in _split(line):
            if words := _strip_prefix(words):
                found.append((block.line + start, words))
    return found


def _split(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if word.strip("<>") == "":
            skip = True  # a file's name follows
        elif word.strip("&|;") == "":
            parts.append([])
        elif not skip:
            parts[-1].append(word)
        else:
            skip = False
    return parts


def _strip_prefix(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*|sudo|env|exec|time", words[0], flags=re.DOTALL):
        words = words[1:]
    if words[:3] == ["ip", "netns", "exec"]:
        words = words[4:]
    if not words or _PROGRAM.fullmatch(words[0]) is None:
        return []
    return [words[0].rsplit("/", 1)[-1].rstrip("3"), *words[1:]]


def fault_of(words: list[str]) -> str:
    """Returns what is wrong with a command, "" if nothing is."""
    program, arguments = words[0], words[1:]
    if program == "make":
        return _fault_of_make(arguments)
    if program == "torchquorum":
        return _fault_of_torchquorum(arguments)
    return _fault_of_python(arguments)


def _fault_of_make(arguments: list[str]) -> str:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    missing = [word for word in arguments if "=" not in word and not word.startswith("-") and word not in targets]
    return f"the Makefile has no target {missing[0]}" if missing else ""


def _fault_of_torchquorum(arguments: list[str]) -> str:
    command: click.Command = torchquorum_commands()
    context = click.Context(command, info_name="torchquorum", **command.context_settings)
    if {"-h", "--help", "--version"} & set(arguments[-1:]):
        arguments = arguments[:-1]
    try:
        while isinstance(command, click.Group) and arguments:
            name, found, arguments = command.resolve_command(context, arguments)
            assert found is not None and name is not None
            command, parent = found, context
            if not isinstance(command, click.Group):
                # The whole of click's parsing, with types and choices; nothing is called.
                made = command.make_context(name, list(arguments), parent=parent)
                return _fault_of_script(made)
            context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    except click.exceptions.Exit:
        return ""
    except click.UsageError as error:
        return error.format_message()
    return ""


def _fault_of_script(made: click.Context) -> str:
    script = made.params.get("script")
    if made.info_name != "run" or not script or not script.startswith("examples/"):
        return ""
    return _fault_of_python([script, *made.params["arguments"]])


def torchquorum_commands() -> click.Group:
    """Returns the real command line with all its commands."""
    from torchquorum.cli import main
    from torchquorum.cli.command_list import commands

    argv, sys.argv = sys.argv, ["torchquorum", "--version"]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main.main()  # commands may be added when the program starts
    finally:
        sys.argv = argv
    return commands


def _fault_of_python(arguments: list[str]) -> str:
    while arguments and arguments[0] in ("-u", "-O"):
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-c", "-", "-V"):
        return ""
    if arguments[0] == "-m":
        known = importlib.util.find_spec(arguments[1].partition(".")[0]) is not None or arguments[1] == "venv"
        return "" if known else f"no module {arguments[1]}"
    if not arguments[0].startswith(("examples/", "benchmarks/", "tools/", "tests/", "docs/")):
        return ""  # the reader's own program
    script = ROOT / arguments[0]
    if not script.is_file():
        return f"there is no {arguments[0]}"
    given = {word[2:].partition("=")[0].replace("_", "-") for word in arguments[1:] if word.startswith("--")}
    unknown = given - flags_of(script) - CLUSTER_FLAGS - {"help"}
    return f"{arguments[0]} has no flag --{min(unknown)}" if unknown else ""


def flags_of(script: Path) -> set[str]:
    """Returns the flags that a program names: every text in it that begins with two hyphens."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text[2:].replace("_", "-") for text in texts if re.fullmatch(r"--[\w-]+", text)}
