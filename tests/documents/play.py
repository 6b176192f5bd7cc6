"""Executes the documents' blocks: `python -m tests.documents.play DOCUMENT...` prints a line of JSON per failed block.

torch is imported once; each document is played in a fork, in a scratch folder of its own that has the repository's
examples. What always holds: every document has a time limit, and no process is left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.documents import scene
from tests.documents.commands import read_commands
from tests.documents.markdown import ROOT, Block, read_blocks
from tests.process import zygote

LIMIT_S = 120.0
# A command of the documents trains a fiftieth of its steps here.
STEPS_DIVISOR = 50


def main(paths: list[str]) -> None:
    """Plays every document and says what failed."""
    scene.shorten_sessions()
    for path in paths:
        print(json.dumps({"document": path, "failures": play_apart(Path(path).resolve())}), flush=True)


def play_apart(path: Path) -> list[str]:
    """Plays a document in a fork, within its time, and returns what failed."""
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        stage = Path(folder, "stage")
        stage.mkdir()
        for name in ("examples", "benchmarks"):
            (stage / name).symlink_to(ROOT / name)
        child = os.fork()
        if child == 0:
            _play_in_child(path, stage, log, result)
        deadline = time.monotonic() + LIMIT_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.02)
        if result.exists():
            return json.loads(result.read_text())
        return [f"{path.name}: ended before its last block, or took more than {LIMIT_S:.0f} s:\n{_tail(log)}"]


def _play_in_child(path: Path, stage: Path, log: Path, result: Path) -> None:
    os.setsid()  # one signal ends this process and all that it starts
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(stage)
    sys.argv = ["program.py"]
    code = 1
    try:
        failures = play(path, log)
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(failures))
        partial.rename(result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def play(path: Path, log: Path) -> list[str]:
    """Plays the blocks of a document in order and returns what failed, with the end of what had been printed by then."""
    names: dict[str, Any] = scene.names()
    failures = []
    first = ROOT / "README.md"  # what others have word for word is played once
    known = {block.text for block in read_blocks(first) if block.language != "python"} if path != first else set()
    for block in read_blocks(path):
        if block.is_run and block.text not in known:
            shutil.rmtree("runs", ignore_errors=True)  # every block begins a run of its own
            print(f"--- {block.where}", flush=True)
            try:
                if block.language == "python":
                    _play_python(block, names)
                else:
                    _play_commands(block)
            except BaseException:
                failures.append(f"{block.where}: {traceback.format_exc(limit=-3)}\n{_tail(log)}")
    return failures


def _play_python(block: Block, names: dict[str, Any]) -> None:
    names.update(scene.fresh_names(names["mnist"]))
    code = compile("\n" * (block.line - 1) + block.text, str(block.path), "exec")
    try:
        exec(code, names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _play_commands(block: Block) -> None:
    first = [(block.line, block.before.split())] if block.before else []
    for line, words in [*first, *read_commands(block)]:
        # As `torchquorum` and `python` would, in forks: new processes would import torch hundreds of times.
        start = ["-m", "tests.process.forking_launcher"] if words[0] == "torchquorum" else []
        child = os.fork()
        if child == 0:
            zygote.disinherit()
            scene.lengthen_sessions()
            scene.evaluate_less()
            zygote.run([sys.executable, *start, *_shorten(words[1:])])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # the document's time limit holds for it
        if code != 0:
            raise RuntimeError(f"line {line}: {' '.join(words)} ended with {code}")


def _shorten(words: list[str]) -> list[str]:
    """Returns the command with a fiftieth of its steps."""
    text = re.sub(
        r"(--steps[= ])(\d+)",
        lambda m: f"{m[1]}{max(1, int(m[2]) // STEPS_DIVISOR)}",
        "\0".join(words).replace("--steps\0", "--steps "),
    )
    return text.replace("--steps ", "--steps\0").split("\0")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


if __name__ == "__main__":
    main(sys.argv[1:])
