"""Whether there is a Ray at an address, found out in seconds: Ray itself waits for minutes, and says little.

`ray_cluster` asks before it joins a cluster. What always holds: it ends within its deadlines; nothing is imported from Ray here,
processes of Ray's own (`ray health-check`) are asked; `auto` means one cluster and stays it; whether the cluster wants Ray's
token is found out and not guessed, since a driver that has one for a cluster without would wait forever.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from torchquorum import env
from torchquorum.errors import ConfigError

CONNECT_S = 10.0
HEALTH_S = 45.0
CLIENT = "ray://"
TOKEN, NO_TOKEN = "token", "disabled"
# Where several clusters run here, Ray takes any of them for auto, and another one the next time.
WHICH = "from ray._private.services import canonicalize_bootstrap_address as f; print('found', f('auto'))"


def find_cluster(address: str) -> tuple[str, str | None]:
    """Makes sure that a Ray cluster answers.

    Args:
        address: auto, host:port or ray://host:port.

    Returns:
        Its address, and how to come to it, `token` or `disabled`, as RAY_AUTH_MODE has it; None leaves that to Ray.

    Raises:
        ConfigError: Nobody answers there, it is no Ray, or it does not let us in.
    """
    named = address if address != "auto" else _find_auto()
    host, port = _split(named)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise _nobody(named, f"{error.strerror or error}") from None
    if named.startswith(CLIENT):
        return named, None
    chosen = env.ray_auth_mode()
    for mode in (chosen,) if chosen is not None else (NO_TOKEN, TOKEN):
        code, said = _ask(
            ["-m", "ray.scripts.scripts", "health-check", "--skip-version-check", "--address", named], mode
        )
        if code == 0:
            return named, mode
        if "AuthenticationError" not in said:
            raise _nobody(named, _last_line(said))
    raise ConfigError(
        f"--address {named}: this Ray cluster lets in only who has its token, and that of this machine is not it, or there is "
        "none; put the cluster's into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
    )


def _find_auto() -> str:
    """Returns which cluster auto is: that of RAY_ADDRESS, else one that runs on this machine."""
    named = env.ray_address()
    if named is not None and named != "auto":
        return named
    code, said = _ask(["-c", WHICH], env.ray_auth_mode())
    found = [line.split()[1] for line in said.splitlines() if line.startswith("found ") and ":" in line]
    if code or not found:
        raise _nobody("auto", "none runs on this machine" if "any running" in said else _last_line(said))
    return found[0]


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536) or "/" in host:
        raise ConfigError(f"--address {address}: must be auto, host:port or ray://host:port, such as 10.0.0.3:6379")
    return host.strip("[]"), int(port)


def _ask(arguments: list[str], mode: str | None) -> tuple[int, str]:
    try:
        asked = subprocess.run(
            [sys.executable, *arguments],
            env=env.child_environment(RAY_AUTH_MODE=mode),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=HEALTH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"what listens there did not answer as Ray does within {HEALTH_S:.0f} s"
    return asked.returncode, asked.stdout


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (lines[-1] if lines else "it says nothing")[:300].rstrip(".")


def _nobody(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"--address {address}: no Ray cluster answers there ({why}); start one with `ray start --head`, give its host:port, or "
        "leave --address out and Ray is started on this machine"
    )
