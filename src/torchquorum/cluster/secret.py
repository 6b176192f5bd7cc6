"""The secret of a cluster, and whether tasks may do without one.

`sources` reads it for a task, the commands for themselves; `transport` makes keys of it. What always holds: a secret comes
from a file or from the environment, never from the command line, where every user of the host could read it; no text that
this module makes, a message or a repr, holds a secret or a part of one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from torchquorum import env
from torchquorum.errors import SecretError

LEAST_CHARACTERS = 32
MOST_CHARACTERS = 4096
KEY_BYTES = 32
MAKE_ONE = "`torchquorum secret --out FILE` makes one"
ADVICE = (
    f"{MAKE_ONE}; copy the file to every host and give every task --secret-file=FILE (or set {env.SECRET_FILE}), "
    f"or say --insecure (or {env.INSECURE}=1) on a network where you trust everybody"
)


class Secret:
    """What all tasks of a cluster know and nobody else does; it does not show itself.

    Args:
        text: The secret.
        label: Where it comes from, for messages.

    Raises:
        SecretError: It is too short to be one, or has spaces inside.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str, label: str = "the secret") -> None:
        clean = text.strip()
        if not LEAST_CHARACTERS <= len(clean) <= MOST_CHARACTERS:
            raise SecretError(
                f"{label} has {len(clean)} characters: a secret has {LEAST_CHARACTERS} to {MOST_CHARACTERS}, so that nobody "
                f"can guess it; {MAKE_ONE}"
            )
        if re.search(r"\s", clean):
            raise SecretError(f"{label} has spaces or several lines: a secret is one word; {MAKE_ONE}")
        self._text = clean

    def derive(self, purpose: str) -> bytes:
        """Returns 32 bytes that only those who know the secret can make; others for every purpose."""
        whole = hashlib.blake2b(self._text.encode(), key=b"torchquorum secret", digest_size=64).digest()
        return hashlib.blake2b(purpose.encode(), key=whole, digest_size=KEY_BYTES).digest()

    def __eq__(self, other: object) -> bool:
        return hmac.compare_digest(self._text.encode(), other._text.encode()) if isinstance(other, Secret) else False

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a secret does not travel")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may talk to a task.

    Attributes:
        secret: Only those who know it; None for everybody who reaches the port.
        insecure: Whether everybody may come from other hosts, too.
        note: A line for people: what is odd about where the secret was found, or nothing.
    """

    secret: Secret | None = None
    insecure: bool = False
    note: str = field(default="", compare=False)


OPEN = Access()


def make_secret() -> str:
    """Returns a new secret."""
    return secrets.token_urlsafe(KEY_BYTES)


def write_secret(path: Path) -> None:
    """Writes a new secret into a new file that only its owner can read.

    Raises:
        SecretError: The file is there already, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecretError(
            f"{path}: is there already, and a secret in use is not overwritten; give another name or delete it first"
        ) from None
    except OSError as error:
        raise SecretError(f"{path}: cannot be written ({error.strerror}); give a file in a folder of yours") from None
    with os.fdopen(fd, "w") as file:
        file.write(make_secret() + "\n")


def read_access(secret_file: str | None = None, insecure: bool | None = None) -> Access:
    """Returns who may talk to the tasks of this process.

    Args:
        secret_file: The file with the secret, if a flag or an argument names one; otherwise the environment is asked.
        insecure: Whether tasks may do without, likewise.

    Raises:
        SecretError: The file cannot be read, or what is in it is no secret.
    """
    open_to_all = env.insecure() if insecure is None else insecure
    text, path = env.secret(), secret_file or env.secret_file()
    if secret_file is None and text is not None:
        if path is not None:
            raise SecretError(f"{env.SECRET} and {env.SECRET_FILE} are both set; unset one of them")
        return Access(secret=Secret(text, env.SECRET), insecure=open_to_all)
    if path is None:
        return Access(insecure=open_to_all)
    secret, note = _read(Path(path).expanduser())
    return Access(secret=secret, insecure=open_to_all, note=note)


def _read(path: Path) -> tuple[Secret, str]:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            raw = file.read(MOST_CHARACTERS + 2)
    except OSError as error:
        raise SecretError(
            f"the secret file {path} cannot be read ({error.strerror}); {MAKE_ONE}, or copy it from another host"
        ) from None
    try:
        text = raw.decode("utf-8-sig")  # some editors put a mark in front
    except UnicodeDecodeError:
        raise SecretError(f"the secret file {path} does not hold text; {MAKE_ONE}") from None
    open_to_others = stat.S_ISREG(about.st_mode) and about.st_mode & (stat.S_IROTH | stat.S_IWOTH)
    note = f"other users of this host can read the secret in {path}: chmod 600 {path}" if open_to_others else ""
    return Secret(text, f"the secret in {path}"), note
