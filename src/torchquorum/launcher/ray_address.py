"""Checks within seconds whether a Ray cluster answers at an address: Ray itself waits for minutes, with a poor message.

`ray_cluster` calls it before it joins a cluster. What always holds: it ends within its deadlines; it imports nothing of Ray and
runs `ray health-check` instead; `auto` is resolved once to one cluster; whether the cluster requires Ray's token is probed, not
guessed, because a driver with a token waits for ever on a cluster without one.
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
# If several clusters run here, Ray resolves auto to any of them, each time anew.
WHICH = "from ray._private.services import canonicalize_bootstrap_address as f; print('found', f('auto'))"


def find_cluster(address: str) -> tuple[str, str | None]:
    """Checks that a Ray cluster answers.

    Args:
        address: auto, host:port or ray://host:port.

    Returns:
        Its address, and its RAY_AUTH_MODE, `token` or `disabled`; None leaves that to Ray.

    Raises:
        ConfigError: Nothing answers there, it is not Ray, or it refuses access.
    """
    named = address if address != "auto" else _find_auto()
    host, port = _split(named)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise no_cluster(named, f"{error.strerror or error}") from None
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
            raise no_cluster(named, _last_line(said))
    raise ConfigError(
        f"--address {named}: this Ray cluster requires its token, and this machine has none or another one; "
        "put the cluster's token into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
    )


def _find_auto() -> str:
    """Resolves auto: the cluster of RAY_ADDRESS, or one that runs on this machine."""
    named = env.ray_address()
    if named is not None and named != "auto":
        return named
    code, said = _ask(["-c", WHICH], env.ray_auth_mode())
    found = [line.split()[1] for line in said.splitlines() if line.startswith("found ") and ":" in line]
    if code or not found:
        raise no_cluster("auto", "no cluster runs on this machine" if "any running" in said else _last_line(said))
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
        return 1, f"no answer in Ray's protocol within {HEALTH_S:.0f} s"
    return asked.returncode, asked.stdout


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output")[:300].rstrip(".")


def no_cluster(address: str, why: str) -> ConfigError:
    """Returns the error for an address where no cluster answers."""
    return ConfigError(
        f"--address {address}: no Ray cluster answers there ({why}); start one with `ray start --head`, give its host:port, or "
        "leave --address out to start Ray on this machine"
    )
