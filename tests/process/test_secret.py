"""A run with a secret: the secret is nowhere but where the user put it."""

import contextlib
import os
import sys
from pathlib import Path

from tests.process.tasks import Started, by_hand

SECRET = "known-secret-of-the-tests-5f2c9a71e8d04b36"


def all_command_lines() -> bytes:
    """Returns the command lines of all processes of this machine."""
    found: list[bytes] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_bytes() if entry.name.isdigit() else b"")
    return b"\n".join(found)


def test_the_secret_is_in_no_output_no_process_list_and_no_file_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {"TORCHQUORUM_SECRET": SECRET}
    with by_hand(workers=1) as cluster:
        options = (
            "--steps=40",
            f"--hold={tmp_path / 'asked'}",
            "--save-steps=10",
            f"--logdir={folder}",
            "--summaries",
            "--transport=tcp",
            "--pause=0.05",
        )
        tasks = [Started(cluster.command(job, 0, *options), environment) for job in ("ps", "worker")]
        cluster.started += tasks
        tasks[1].until("local 5 ")
        status = Started(
            [sys.executable, "-m", "torchquorum.cli.main", "status", cluster.ps_hosts, "--json", "--timeout=60"],
            environment,
        )
        cluster.started.append(status)
        commands = all_command_lines()
        assert cluster.ps_hosts.encode() in commands
        assert status.wait() == 0, status.tail()
        (tmp_path / "asked").touch()
        for task in tasks:
            assert task.wait() == 0, task.tail()
        assert "over tcp" in "\n".join(tasks[1].lines)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"report.json"} <= {path.name for path in files} and any("model.ckpt" in str(path) for path in files)
    texts = [commands, *(path.read_bytes() for path in files)]
    texts += ["\n".join(task.lines).encode() for task in (*tasks, status)]
    assert not any(SECRET.encode() in text for text in texts)


def test_the_local_launcher_hands_the_secret_on_without_naming_it(tmp_path: Path) -> None:
    secret = tmp_path / "s"
    secret.write_text(SECRET)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, torchquorum as tq\n"
        "task = tq.join()\n"
        "print('secret', task.access.secret, os.environ.get('TORCHQUORUM_SECRET'), flush=True)\n"
        "for found in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    try:\n"
        "        print(found.read_text(errors='replace'))  # of the launcher and all tasks too\n"
        "    except OSError:\n"
        "        pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "torchquorum.cli.main",
        "run",
        "--workers=1",
        f"--secret-file={secret}",
        str(program),
    ]
    run = Started(command, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    try:
        run.wait()
        output = "\n".join(run.lines)
        assert "secret Secret(hidden) None" in output and "for those who know the secret" in output, run.tail()
        assert SECRET not in output
    finally:
        run.end()
