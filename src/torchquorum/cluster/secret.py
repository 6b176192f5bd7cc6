"""The secret of a cluster, and whether tasks may run without one.

Read by `sources` for a task and by the commands; `wire` derives keys from it. What always holds: a secret comes from a file or
from the environment, never from the command line, where every user of the host could read it; no message and no repr contains
a secret or a part of it.
"""

from __future__ import annotations

import base64
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
READ_ONLY = "read-only."  # what the read-only form of a secret begins with
MAKE_ONE = "`torchquorum secret --out FILE` creates one"
MAKE_READ_ONLY = "`torchquorum secret --read-only --secret-file FILE` makes one from the cluster's secret"
ADVICE = (
    f"{MAKE_ONE}; copy the file to every host and give every task --secret-file=FILE (or set {env.SECRET_FILE}), "
    f"or use --insecure (or {env.INSECURE}=1) on a network where you trust every host"
)


class Secret:
    """The text that only the tasks of a cluster know; never shown.

    Args:
        text: The secret.
        label: Its source, for messages.

    Raises:
        SecretError: It is too short or too long, or contains spaces.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str, label: str = "the secret") -> None:
        clean = text.strip()
        if not LEAST_CHARACTERS <= len(clean) <= MOST_CHARACTERS:
            raise SecretError(
                f"{label} has {len(clean)} characters: must be {LEAST_CHARACTERS} to {MOST_CHARACTERS}, so that it cannot "
                f"be guessed; {MAKE_ONE}"
            )
        if re.search(r"\s", clean):
            raise SecretError(f"{label} has spaces or several lines: must be one word; {MAKE_ONE}")
        self._text = clean

    def derive(self, purpose: str) -> bytes:
        """Returns a key of 32 bytes, different for every purpose, that only tasks with the secret can derive."""
        whole = hashlib.blake2b(self._text.encode(), key=b"torchquorum secret", digest_size=64).digest()
        return hashlib.blake2b(purpose.encode(), key=whole, digest_size=KEY_BYTES).digest()

    @property
    def is_read_only(self) -> bool:
        """Whether it is the read-only form of a secret, with which a run can be read and nothing else."""
        return self._text.startswith(READ_ONLY)

    def read_only_content(self) -> bytes:
        """Returns what the read-only form holds.

        Raises:
            SecretError: It is damaged.
        """
        try:
            return base64.b64decode(self._text.removeprefix(READ_ONLY), altchars=b"-_", validate=True)
        except ValueError:
            raise SecretError(f"a read-only secret is damaged; {MAKE_READ_ONLY}") from None

    def __eq__(self, other: object) -> bool:
        return hmac.compare_digest(self._text.encode(), other._text.encode()) if isinstance(other, Secret) else False

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a secret cannot be pickled")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may connect to a task.

    Attributes:
        secret: Required of every peer; None lets in every peer that reaches the port.
        insecure: Whether peers without a secret may come from other hosts too.
        note: A warning about where the secret was found, or empty.
    """

    secret: Secret | None = None
    insecure: bool = False
    note: str = field(default="", compare=False)


OPEN = Access()


def make_secret() -> str:
    """Returns a new secret."""
    return secrets.token_urlsafe(KEY_BYTES)


def write_secret(path: Path, text: str | None = None) -> None:
    """Writes a secret, by default a new one, to a new file that only its owner can read.

    Raises:
        SecretError: The file exists, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecretError(f"{path}: already exists, and may be in use; give another name, or delete it first") from None
    except OSError as error:
        raise SecretError(
            f"{path}: cannot be written ({error.strerror}); choose a folder that you can write to"
        ) from None
    with os.fdopen(fd, "w") as file:
        file.write((make_secret() if text is None else text) + "\n")


def read_access(secret_file: str | None = None, insecure: bool | None = None) -> Access:
    """Returns who may connect to the tasks of this process.

    Args:
        secret_file: The file with the secret, if a flag or an argument names one; otherwise the environment is read.
        insecure: Whether tasks may run without a secret, likewise.

    Raises:
        SecretError: The file cannot be read, or holds no valid secret.
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
        text = raw.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError:
        raise SecretError(f"the secret file {path} does not hold text; {MAKE_ONE}") from None
    open_to_others = stat.S_ISREG(about.st_mode) and about.st_mode & (stat.S_IROTH | stat.S_IWOTH)
    note = f"other users of this host can read the secret in {path}: chmod 600 {path}" if open_to_others else ""
    return Secret(text, f"the secret in {path}"), note
