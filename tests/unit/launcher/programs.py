"""Small programs that interrupt themselves, each run in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.process.zygote import run_python

BEGIN = """
import os, signal, sys, threading, time

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # Python looks for signals here, if not before
"""


def run_program(text: str, folder: Path) -> tuple[str, str]:
    """Runs a program that starts with BEGIN; returns its output and its errors."""
    (folder / "program.py").write_text(BEGIN + text)
    ran = run_python([sys.executable, str(folder / "program.py")], os.environ, timeout_s=100, cwd=folder)
    return ran.stdout.strip(), ran.stderr
