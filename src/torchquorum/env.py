"""The environment: the only place where torchquorum reads it.

`cluster` asks it who this task is, `launcher` makes the environment of the tasks it starts, `cli`, `jobs` and `session`
ask for their defaults. What always holds: nothing is read at import, nothing is written to this process's own
environment but by a fork of `tq.launch` before it begins and RAY_AUTH_MODE before Ray reads it, and a variable that is set
but blank counts as not set.
"""

import os
from collections.abc import Mapping

from torchquorum.errors import ConfigError

TF_CONFIG = "TF_CONFIG"
CLUSTER_SPEC = "CLUSTER_SPEC"
TASK = "TORCHQUORUM_TASK"
TRANSPORT = "TORCHQUORUM_TRANSPORT"
REPORT = "TORCHQUORUM_REPORT"
LOGDIR = "TORCHQUORUM_LOGDIR"
DURABLE = "TORCHQUORUM_DURABLE"
STARTED_AT = "TORCHQUORUM_STARTED_AT"
SECRET = "TORCHQUORUM_SECRET"
SECRET_FILE = "TORCHQUORUM_SECRET_FILE"
INSECURE = "TORCHQUORUM_INSECURE"
PS = "TORCHQUORUM_PS"
PORT = "TORCHQUORUM_PORT"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
RAY_ADDRESS = "RAY_ADDRESS"
RAY_AUTH_MODE = "RAY_AUTH_MODE"


def _environment() -> Mapping[str, str]:
    return os.environ  # noqa: TID251  (this module is the one reader)


def _read(name: str) -> str | None:
    text = _environment().get(name, "")
    return text if text.strip() else None


def tf_config() -> str | None:
    """Return the text of TF_CONFIG, as it is, or None."""
    return _read(TF_CONFIG)


def task() -> str | None:
    """Return the JSON text in which the launcher says which task this process is, or None."""
    return _read(TASK)


def variables(*names: str, prefix: str | None = None) -> dict[str, str]:
    """Return the variables of other launchers that are set, without the spaces around them.

    Args:
        *names: Those to look for.
        prefix: Those whose names begin so, too.
    """
    there = _environment()
    wanted = [*names, *(name for name in there if prefix is not None and name.startswith(prefix))]
    return {name: text.strip() for name in wanted if (text := _read(name)) is not None}


def transport() -> str | None:
    """Return the transport asked for by TORCHQUORUM_TRANSPORT, unchecked, or None."""
    return _read(TRANSPORT)


def report() -> str | None:
    """Return the path where the report of the run should be written, or None."""
    return _read(REPORT)


def logdir() -> str | None:
    """Return the folder of the run, or None."""
    return _read(LOGDIR)


def durable() -> str | None:
    """Return how the run's updates are to be journalled, unchecked, or None."""
    return _read(DURABLE)


def started_at() -> float | None:
    """Return when the launcher was started, in seconds since the epoch, or None.

    Raises:
        ConfigError: The variable is set, but not to a number.
    """
    text = _read(STARTED_AT)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{STARTED_AT}={text!r}: must be a time in seconds since the epoch; the launcher sets it, so unset it"
        ) from None


def secret() -> str | None:
    """Return the secret of the cluster, as it is, or None."""
    return _read(SECRET)


def secret_file() -> str | None:
    """Return the path of the file that holds the secret of the cluster, or None."""
    return _read(SECRET_FILE)


def insecure() -> bool:
    """Tell whether tasks may listen for other hosts without a secret.

    Raises:
        ConfigError: The variable is set, but neither to yes nor to no.
    """
    text = (_read(INSECURE) or "0").strip().lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigError(f"{INSECURE}={text!r}: must be 1 or 0; unset it for 0")
    return text in ("1", "true", "yes")


def has_omp_num_threads() -> bool:
    """Tell whether the user has chosen the number of threads of an operation, which we then leave alone."""
    return omp_num_threads() is not None


def omp_num_threads() -> str | None:
    """Return the number of threads of an operation that the user has chosen, unchecked, or None."""
    return _read(OMP_NUM_THREADS)


def ray_address() -> str | None:
    """Return the address of the Ray cluster that programs here use, as Ray's own tools set it, or None."""
    return _read(RAY_ADDRESS)


def ray_auth_mode() -> str | None:
    """Return how the user wants to come to Ray, with its token or without, or None."""
    return _read(RAY_AUTH_MODE)


def set_ray_auth_mode(mode: str | None) -> None:
    """Say to Ray, in this process, whether the cluster wants its token; it knows no other way to be told."""
    if mode is None:
        os.environ.pop(RAY_AUTH_MODE, None)  # noqa: TID251
    else:
        os.environ[RAY_AUTH_MODE] = mode  # noqa: TID251


def child_environment(**extra: str | None) -> dict[str, str]:
    """Return a copy of this process's environment for a child process.

    Args:
        **extra: Variables to set on top of the copy; one that is None is taken out of it.
    """
    environment = dict(_environment())
    for name, value in extra.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def become_child(**extra: str | None) -> None:
    """Change the environment of this process, which was just forked to be a task, as `child_environment` would.

    Args:
        **extra: Variables to set; one that is None is taken out.
    """
    for name, value in extra.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251
        else:
            os.environ[name] = value  # noqa: TID251
