"""Who holds a TCP port on this host: /proc read, for error messages only. Linux; elsewhere the answer is 'unknown'."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"


def listening_process(port: int) -> str | None:
    """Returns 'process 123 (python train.py)' for the process that listens on a port, or None where it cannot be told."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = any(str(fd.readlink()) in wanted for fd in (process / "fd").iterdir())
        except OSError:
            continue
        if held:
            return f"process {process.name} ({_command(process)})"
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _command(process: Path) -> str:
    try:
        text = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return "unknown"
    return " ".join(text.split())[:80] or "unknown"  # in one line, also of a program that was given as text
