"""The checks of `torchquorum doctor`: each examines one thing and returns what it found and what to do about it.

What always holds: a check never raises and never hangs; each host has a timeout.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata

from torchquorum.clock import SYSTEM
from torchquorum.cluster.secret import ADVICE, OPEN, Access
from torchquorum.errors import ConfigError, SecretError, TorchQuorumError
from torchquorum.formats.storage import Location, RemotePath, check_writable
from torchquorum.lines import counted

PACKAGES = ("torch", "numpy", "cryptography", "msgspec", "safetensors", "tensorboard", "rich", "click")
LEAST_TORCH = (2, 11)
LOW_DISK_BYTES = 1 << 30
LOW_FILES = 1024
LOW_SHM_BYTES = 64 << 20
SEGMENT_BYTES = 1 << 20
AT_ONCE = 32  # hosts that are checked at the same time


@dataclass(frozen=True)
class CheckResult:
    """What a check found: `level` is ok, warn or fail; `advice` says what to do, if anything."""

    name: str
    level: str
    found: str
    advice: str = ""


def check_machine(logdir: Location) -> list[CheckResult]:
    """Checks this machine."""
    checks: list[tuple[str, Callable[[], list[CheckResult]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("torch", _torch),
        ("devices", _devices),
        ("cores", _cores),
        ("shared memory", _shared_memory),
        ("local ports", _ports),
        ("open files", _open_files),
        ("run folder", lambda: [_run_folder(logdir)]),
    ]
    return [found for name, check in checks for found in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """Returns what a check finds, or that it failed itself: the others are made all the same."""
    try:
        return check()
    except Exception as error:
        text, advice = f"{type(error).__name__}: {error}", "this check itself failed: please report it"
        return [CheckResult(name, "fail", text, advice)]


def _python() -> list[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    where = f"{version} in {sys.prefix}"
    if sys.platform != "linux":
        text = f"{where}, on {sys.platform}"
        return [CheckResult("python", "warn", text, "shared memory and pidfd are Linux only; use --transport tcp")]
    return [CheckResult("python", "ok", where)]


def _packages() -> list[CheckResult]:
    versions, missing = [], []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return [CheckResult("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")]
    return [CheckResult("packages", "ok", ", ".join(versions))]


def _torch() -> list[CheckResult]:
    started = SYSTEM.now()
    try:
        import torch
    except Exception as error:
        return [CheckResult("torch", "fail", f"cannot be imported: {error}", "pip install --force-reinstall torch")]
    took = SYSTEM.now() - started
    version = str(torch.__version__)
    text = f"{version}, imported in {took:.1f} s, {counted(torch.get_num_threads(), 'thread')} per operation"
    try:
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        numbers = LEAST_TORCH
    if numbers < LEAST_TORCH:
        return [CheckResult("torch", "fail", text, f"install torch {'.'.join(map(str, LEAST_TORCH))} or newer")]
    weight = torch.ones(4, requires_grad=True)
    (weight * weight).sum().backward()
    if weight.grad is None or weight.grad.sum().item() != 8.0:
        return [
            CheckResult("torch", "fail", f"{text}; it computes a wrong gradient", "pip install --force-reinstall torch")
        ]
    return [CheckResult("torch", "ok", text)]


def _devices() -> list[CheckResult]:
    try:
        import torch
    except Exception:
        return []
    if not torch.cuda.is_available():
        return [CheckResult("devices", "ok", "CPU; no GPU that torch can use")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [CheckResult("devices", "ok", "CPU and " + ", ".join(f"cuda:{i} ({n})" for i, n in enumerate(names)))]


def _cores() -> list[CheckResult]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    text = f"{usable} usable, load {load:.1f}"
    if load > 1.5 * usable:
        return [CheckResult("cores", "warn", text, "other programs use this machine: training will be slower")]
    return [CheckResult("cores", "ok", text)]


def _shared_memory() -> list[CheckResult]:
    found = []
    try:
        fd = os.memfd_create("torchquorum-doctor")
        try:
            os.ftruncate(fd, SEGMENT_BYTES)
            with open(f"/proc/{os.getpid()}/fd/{fd}", "r+b") as again:  # as another process would open it
                again.write(b"\1")
        finally:
            os.close(fd)
        found.append(CheckResult("shared memory", "ok", "anonymous shared files (memfd) work"))
    except (OSError, AttributeError) as error:
        advice = "tasks on this host cannot share memory; use --transport tcp"
        found.append(CheckResult("shared memory", "warn", f"memfd does not work: {error}", advice))
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return found
    if free < LOW_SHM_BYTES:
        advice = "torchquorum does not use it, but DataLoader workers do: start the container with --shm-size=1g"
        found.append(CheckResult("/dev/shm", "warn", f"{free / 1e6:.0f} MB free", advice))
    return found


def _ports() -> list[CheckResult]:
    try:
        with socket.socket() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            client.settimeout(2.0)
            client.connect(listener.getsockname())
    except OSError as error:
        advice = "a local cluster uses 127.0.0.1: check the firewall, or the container's network"
        return [CheckResult("local ports", "fail", f"no connection over 127.0.0.1: {error}", advice)]
    try:
        where = socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        advice = "add the line `127.0.0.1 localhost` to /etc/hosts, or use 127.0.0.1"
        return [CheckResult("local ports", "warn", f"the name localhost cannot be resolved: {error}", advice)]
    return [CheckResult("local ports", "ok", f"free ports on 127.0.0.1; localhost is {where}")]


def _open_files() -> list[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft} per process (can be raised to {hard})"
    if soft < LOW_FILES:
        return [CheckResult("open files", "warn", text, f"a ps needs a few per worker: ulimit -n {min(hard, 4096)}")]
    return [CheckResult("open files", "ok", text)]


def _run_folder(logdir: Location) -> CheckResult:
    if isinstance(logdir, RemotePath):
        try:
            check_writable(logdir)
        except ConfigError as error:
            return CheckResult("run folder", "fail", str(error), "give another --logdir")
        return CheckResult("run folder", "ok", f"{logdir} can be written")
    place = logdir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return CheckResult("run folder", "fail", f"{place} is not a folder", "give another --logdir")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".torchquorum-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = error.strerror or str(error)
        return CheckResult(
            "run folder", "fail", f"{place.absolute()} cannot be written: {why}", "give another --logdir"
        )
    free = shutil.disk_usage(place).free
    text = f"{logdir} can be written, {free / 1e9:.1f} GB free"
    if free < LOW_DISK_BYTES:
        return CheckResult("run folder", "warn", text, "checkpoints need space: free some, or give another --logdir")
    return CheckResult("run folder", "ok", text)


# -- a cluster's hosts ----------------------------------------------------------------------------------------------------


def check_secret(access: Access, hosts: Mapping[str, Sequence[str]]) -> list[CheckResult]:
    """Checks whether tasks on these hosts need a secret, and whether there is one."""
    from torchquorum.wire.address import is_loopback

    if access.secret is not None:
        import ssl

        if not ssl.HAS_TLSv1_3:
            return [
                CheckResult(
                    "secret",
                    "fail",
                    f"given, but {ssl.OPENSSL_VERSION} of this Python cannot do TLS 1.3",
                    "use a Python that was built with OpenSSL 1.1.1 or newer",
                )
            ]
        return [
            CheckResult("secret", "warn" if access.note else "ok", access.note or "given: connections are encrypted")
        ]
    outside = [a for a in hosts.get("ps", ()) if not is_loopback(a.rpartition(":")[0])]
    if outside and not access.insecure:
        return [
            CheckResult("secret", "warn", f"not given, and {outside[0]} is not loopback: its ps will not start", ADVICE)
        ]
    return []


def check_hosts(hosts: Mapping[str, Sequence[str]], timeout_s: float, access: Access = OPEN) -> list[CheckResult]:
    """Checks the connection to every host of a cluster, in parallel. Only ps tasks listen; a worker's address is only resolved.

    Args:
        hosts: The addresses of the jobs ps and worker.
        timeout_s: How long to wait for each host, in seconds.
        access: The cluster's secret, if it has one.
    """
    ps = [(f"ps {i}", a) for i, a in enumerate(hosts.get("ps", ()))]
    workers = [(f"worker {i}", a) for i, a in enumerate(hosts.get("worker", ()))]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="torchquorum-doctor") as pool:
        checks = [(name, lambda n=name, a=address: [_ps(n, a, timeout_s, access)]) for name, address in ps]
        checks += [(name, lambda n=name, a=address: [_worker(n, a)]) for name, address in workers]
        return [result for found in pool.map(lambda check: _guarded(*check), checks) for result in found]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _resolve(name: str, address: str) -> tuple[socket.AddressFamily, tuple[str, int]] | CheckResult:
    host, port = _split(address)
    try:
        options = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = f"check the spelling of {host}, or add it to DNS or /etc/hosts"
        return CheckResult(name, "fail", f"{address}: the name cannot be resolved ({error.strerror or error})", advice)
    options.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return options[0][0], (str(options[0][4][0]), port)


def _worker(name: str, address: str) -> CheckResult:
    where = _resolve(name, address)
    if isinstance(where, CheckResult):
        return where
    return CheckResult(name, "ok", f"{address} is {where[1][0]} (workers do not listen, so only the name is checked)")


def _ps(name: str, address: str, timeout_s: float, access: Access) -> CheckResult:
    where = _resolve(name, address)
    if isinstance(where, CheckResult):
        return where
    family, target = where
    shown = address if address.startswith(target[0]) else f"{address} ({target[0]})"
    try:
        with socket.socket(family) as probe:
            probe.settimeout(timeout_s)
            probe.connect(target)
    except TimeoutError:
        advice = "the host is down, or a firewall drops the packets: open the port, or check the address"
        return CheckResult(name, "fail", f"{shown}: no answer within {timeout_s:g} s", advice)
    except OSError as error:
        return _not_connected(name, shown, error)
    return _ask_ps(name, address, shown, timeout_s, access)


def _not_connected(name: str, shown: str, error: OSError) -> CheckResult:
    if error.errno == errno.ECONNREFUSED:
        advice = "the host is there, but nothing listens: start the ps task, or check the port"
        return CheckResult(name, "fail", f"{shown}: connection refused", advice)
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return CheckResult(name, "fail", f"{shown}: no route ({error.strerror})", "check the network, VPN and routes")
    return CheckResult(name, "fail", f"{shown}: {error.strerror or error}", "check the address and the network")


def _ask_ps(name: str, address: str, shown: str, timeout_s: float, access: Access) -> CheckResult:
    """Something listens there: checks that it is the right ps task."""
    from torchquorum.launcher.watch import Watcher
    from torchquorum.wire.procnet import listening_process

    try:
        with closing(Watcher(address, access=access)) as watcher:
            body = watcher.ask(timeout_s)
    except SecretError as error:
        return CheckResult(name, "fail", f"{shown}: refuses the connection", str(error))
    except TorchQuorumError:  # no answer, or not one of ours
        host, port = _split(address)
        local = host in ("localhost", "127.0.0.1", "::1", socket.gethostname())
        holder = listening_process(port) if local else None
        who = f": {holder}" if holder else ""
        advice = "end that program, or change the port of this ps in --ps_hosts on every task"
        return CheckResult(
            name, "fail", f"{shown}: something else answers there, not a ps task of torchquorum{who}", advice
        )
    expected = f"/job:ps/task:{name.split()[1]}"
    if body.get("task") != expected:
        text = f"{shown}: {body.get('task')} answers, not {expected}"
        return CheckResult(name, "fail", text, "the order of --ps_hosts must be the same on every task")
    if "global_step" in body:
        return CheckResult(name, "ok", f"{shown}: a ps task of torchquorum, at global step {body['global_step']}")
    state = "it holds its shard" if body.get("ready") else "it waits for the chief"
    return CheckResult(name, "ok", f"{shown}: a ps task of torchquorum; {state}")
