"""The environment: the only place where torchquorum reads it.

`cluster` reads which task this is, `launcher` builds the environment of the tasks it starts, `cli`, `jobs` and `session` read
their defaults. What always holds: nothing is read at import; this process's own environment is written only in a fork of
`tq.launch` before it begins, and RAY_AUTH_MODE before Ray reads it; a blank variable counts as not set.
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
START_AFRESH = "TORCHQUORUM_START_AFRESH"
ACCEPT_LOSS = "TORCHQUORUM_ACCEPT_LOSS"
RECORD = "TORCHQUORUM_RECORD"
EVENTS = "TORCHQUORUM_EVENTS"
COMMAND = "TORCHQUORUM_COMMAND"
REPLAY = "TORCHQUORUM_REPLAY"
FORK = "TORCHQUORUM_FORK"
JOINED = "TORCHQUORUM_JOINED"
STARTED_AT = "TORCHQUORUM_STARTED_AT"
SECRET = "TORCHQUORUM_SECRET"
SECRET_FILE = "TORCHQUORUM_SECRET_FILE"
INSECURE = "TORCHQUORUM_INSECURE"
PS = "TORCHQUORUM_PS"
PORT = "TORCHQUORUM_PORT"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
# What of an environment changes what a program computes: a record keeps it. Everything else may hold secrets.
OF_COMPUTING = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "GOTO_",
    "DNNL_",
    "ONEDNN_",
    "ATEN_",
    "TORCH_",
    "CUBLAS_",
    "CUDA_",
    "NVIDIA_TF32",
)
TO_REPEAT = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
RAY_ADDRESS = "RAY_ADDRESS"
RAY_AUTH_MODE = "RAY_AUTH_MODE"


def _environment() -> Mapping[str, str]:
    return os.environ  # noqa: TID251  (this module is the one reader)


def _read(name: str) -> str | None:
    text = _environment().get(name, "")
    return text if text.strip() else None


def tf_config() -> str | None:
    """Returns the text of TF_CONFIG, unchecked, or None."""
    return _read(TF_CONFIG)


def task() -> str | None:
    """Returns the launcher's JSON that names this task, or None."""
    return _read(TASK)


def variables(*names: str, prefix: str | None = None) -> dict[str, str]:
    """Returns the variables that are set, without surrounding spaces.

    Args:
        *names: The names to read.
        prefix: Also reads all names with this prefix.
    """
    there = _environment()
    wanted = [*names, *(name for name in there if prefix is not None and name.startswith(prefix))]
    return {name: text.strip() for name in wanted if (text := _read(name)) is not None}


def transport() -> str | None:
    """Returns the transport in TORCHQUORUM_TRANSPORT, unchecked, or None."""
    return _read(TRANSPORT)


def report() -> str | None:
    """Returns the path for the report of the run, or None."""
    return _read(REPORT)


def logdir() -> str | None:
    """Returns the folder of the run, or None."""
    return _read(LOGDIR)


def durable() -> str | None:
    """Returns how the run's updates are journalled, unchecked, or None."""
    return _read(DURABLE)


def start_afresh() -> bool:
    """Returns whether the launcher was asked to let a run begin again at step 0 if it cannot be restored."""
    return _read(START_AFRESH) is not None


def accept_loss() -> bool:
    """Returns whether the launcher was asked to let a durable run go on without updates that are lost."""
    return _read(ACCEPT_LOSS) is not None


def record() -> bool:
    """Returns whether the launcher was asked to record the run."""
    return _read(RECORD) is not None


def command() -> str | None:
    """Returns how the launcher was called, or None."""
    return _read(COMMAND)


def events() -> bool:
    """Returns whether the launcher asks sessions for TensorBoard's event files."""
    return _read(EVENTS) is not None


def replay() -> str | None:
    """Returns the file that says which life of a recorded worker this process is, or None."""
    return _read(REPLAY)


def joined() -> int | None:
    """Returns the descriptor on which the launcher learns that this process has joined, or None."""
    text = _read(JOINED) or ""
    return int(text) if text.isdecimal() else None


def is_fork() -> bool:
    """Whether this process is a fork of `tq.launch`, so that no command starts it."""
    return _read(FORK) is not None


def to_repeat() -> dict[str, str]:
    """Returns what the environment of a task needs so that it computes the same when it is run again, unless the user has chosen."""
    return {name: text for name, text in TO_REPEAT.items() if _read(name) is None}


def of_computing() -> dict[str, str]:
    """Returns the variables that change what a program computes."""
    return {name: value for name, value in _environment().items() if name.startswith(OF_COMPUTING)}


def started_at() -> float | None:
    """Returns when the launcher was started, in seconds since the epoch, or None.

    Raises:
        ConfigError: The variable is not a number.
    """
    text = _read(STARTED_AT)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{STARTED_AT}={text!r}: must be a time in seconds since the epoch; only the launcher sets it: unset it"
        ) from None


def secret() -> str | None:
    """Returns the secret of the cluster, unchecked, or None."""
    return _read(SECRET)


def secret_file() -> str | None:
    """Returns the path of the file with the cluster's secret, or None."""
    return _read(SECRET_FILE)


def insecure() -> bool:
    """Whether tasks may listen for other hosts without a secret.

    Raises:
        ConfigError: The variable is neither yes nor no.
    """
    text = (_read(INSECURE) or "0").strip().lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigError(f"{INSECURE}={text!r}: must be 1 or 0; unset it for 0")
    return text in ("1", "true", "yes")


def has_omp_num_threads() -> bool:
    """Whether the user has chosen the number of threads per operation."""
    return omp_num_threads() is not None


def omp_num_threads() -> str | None:
    """Returns the user's number of threads per operation, unchecked, or None."""
    return _read(OMP_NUM_THREADS)


def ray_address() -> str | None:
    """Returns the address of the Ray cluster, as Ray's own tools set it, or None."""
    return _read(RAY_ADDRESS)


def ray_auth_mode() -> str | None:
    """Returns the user's choice to use Ray's token or not, or None."""
    return _read(RAY_AUTH_MODE)


def set_ray_auth_mode(mode: str | None) -> None:
    """Tells Ray, in this process, whether the cluster requires its token; there is no other way to set it."""
    if mode is None:
        os.environ.pop(RAY_AUTH_MODE, None)  # noqa: TID251
    else:
        os.environ[RAY_AUTH_MODE] = mode  # noqa: TID251


def child_environment(**extra: str | None) -> dict[str, str]:
    """Returns a copy of this process's environment for a child process.

    Args:
        **extra: Variables to set in the copy; None removes one.
    """
    environment = dict(_environment())
    for name, value in extra.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def for_replay(recorded: Mapping[str, str], file: str) -> dict[str, str]:
    """Returns the environment of a worker's process that is run again: this one's, but for what changes what is computed.

    Args:
        recorded: Those variables, as they were.
        file: Says which life the process is.
    """
    own = {
        name: value for name, value in _environment().items() if not name.startswith((*OF_COMPUTING, "TORCHQUORUM_"))
    }
    own.pop(TF_CONFIG, None)
    return {**own, **recorded, REPLAY: file, "PYTHONUNBUFFERED": "1"}


def become_child(**extra: str | None) -> None:
    """Changes the environment of this process, a new fork that becomes a task, as `child_environment` would.

    Args:
        **extra: Variables to set; None removes one.
    """
    for name, value in extra.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251
        else:
            os.environ[name] = value  # noqa: TID251
