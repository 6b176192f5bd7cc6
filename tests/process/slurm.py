"""A whole Slurm on this machine, from Debian's packages: munged, slurmctld and slurmd as plain processes in a folder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports
from tests.process.tasks import DEADLINE_S, Started

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

CONF = """\
ClusterName=torchquorum
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
FirstJobId={first}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    """Returns why there can be no Slurm here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "needs root, to be Slurm's user"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Runs Slurm with one node; yields the variables that make `srun` find it."""
    host = socket.gethostname().partition(".")[0]
    controller, daemon = free_ports(2)
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    first = secrets.randbelow(60_000) + 1  # ports come from the job's number: two Slurms of one host need others
    text = CONF.format(host=host, folder=folder, controller=controller, daemon=daemon, first=first)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket",)]
    files = [
        f"--{flag}={folder}/munged.{end}"
        for flag, end in (("pid-file", "pid"), ("log-file", "log"), ("seed-file", "s"))
    ]
    conf = ["-D", "-f", str(folder / "slurm.conf")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge, *files],
        ["slurmctld", "-i", *conf],
        ["slurmd", "-N", host, *conf],
    ]
    started: list[Started] = []
    try:
        for command in commands:
            started.append(Started([shutil.which(command[0], path=_path()) or "", *command[1:]], variables))
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), "munged")
        _wait(lambda: "idle" in _sinfo(variables), "a node that is idle")
        yield variables
    finally:
        for task in reversed(started):
            task.end()


def _sinfo(variables: dict[str, str]) -> str:
    ran = subprocess.run(
        ["sinfo", "-h", "-o", "%t"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.stdout


def _wait(ready, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)
