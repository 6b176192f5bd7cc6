"""The secret of a cluster: where it comes from, what is refused, and that it does not show itself."""

import copy
import stat
from pathlib import Path

import pytest

from torchquorum.cluster import parse_flags, resolve
from torchquorum.cluster.secret import Access, Secret, make_secret, read_access, write_secret
from torchquorum.errors import FlagError, SecretError

TEXT = "a-secret-that-is-long-enough-for-tests-0123456789"
TASK = ["--job_name=ps", "--task_id=0", "--ps_hosts=localhost:2222", "--worker_hosts=localhost:2223"]


@pytest.fixture(autouse=True)
def no_secret_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHQUORUM_SECRET", "TORCHQUORUM_SECRET_FILE", "TORCHQUORUM_INSECURE"):
        monkeypatch.delenv(name, raising=False)


def written(tmp_path: Path, text: str = TEXT) -> Path:
    path = tmp_path / "cluster.secret"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


def test_a_new_secret_is_long_and_never_the_same() -> None:
    made = {make_secret() for _ in range(100)}
    assert len(made) == 100 and all(len(text) >= 43 for text in made)


def test_a_secret_file_is_readable_by_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_text()
    with pytest.raises(SecretError, match="already exists"):
        write_secret(path)
    assert path.read_text() == before


@pytest.mark.parametrize("spelling", ["--secret_file={}", "--secret-file={}", "-secret-file={}", "--secret_file='{}'"])
def test_a_task_finds_its_secret_by_a_flag(tmp_path: Path, spelling: str) -> None:
    found = resolve([*TASK, spelling.format(written(tmp_path)), "--rest"])
    assert found is not None and found.access == Access(secret=Secret(TEXT)) and found.remaining == ["--rest"]


def test_a_task_finds_its_secret_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHQUORUM_SECRET", TEXT)
    assert read_access().secret == Secret(TEXT)
    monkeypatch.setenv("TORCHQUORUM_SECRET_FILE", str(written(tmp_path)))
    with pytest.raises(SecretError, match="both set"):
        read_access()
    monkeypatch.delenv("TORCHQUORUM_SECRET")
    assert read_access().secret == Secret(TEXT)


def test_a_flag_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHQUORUM_SECRET", "x" * 40)
    assert read_access(str(written(tmp_path))).secret == Secret(TEXT)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 characters"),
        (b"short", "has 5 characters"),
        (b"two words " * 5, "one word"),
        (b"\xff" * 40, "text"),
    ],
)
def test_what_is_no_secret_is_refused_without_being_shown(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(SecretError, match=why) as raised:
        read_access(str(path))
    assert "short" not in str(raised.value) and "two words" not in str(raised.value)
    assert "torchquorum secret" in str(raised.value)


def test_a_secret_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot be read"):
        read_access(str(tmp_path / "nowhere"))
    with pytest.raises(SecretError, match="cannot be read"):
        read_access(str(tmp_path))


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("", "\n"), ("", "\r\n"), ("\ufeff", "\r\n"), (" ", "\t \n\n")]
)
def test_what_editors_put_around_a_secret_does_not_change_it(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "s"
    path.write_bytes(f"{before}{TEXT}{after}".encode())
    assert read_access(str(path)).secret == Secret(TEXT)


def test_a_file_that_others_can_read_is_noted(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_access(str(path)).note == ""
    path.chmod(0o644)
    assert "chmod 600" in read_access(str(path)).note


@pytest.mark.parametrize(("flag", "said"), [("--insecure", True), ("--insecure=false", False), ("-insecure", True)])
def test_insecure_takes_no_value(flag: str, said: bool) -> None:
    flags, rest = parse_flags([flag, "other"])
    assert flags.insecure is said and rest == ["other"]


def test_insecure_with_nonsense_is_refused() -> None:
    with pytest.raises(FlagError, match="takes no value"):
        parse_flags(["--insecure=perhaps"])


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret(TEXT)
    access = Access(secret=secret)
    assert TEXT not in f"{secret!r} {secret} {access!r} {vars(access)}"
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(secret)


def test_keys_of_other_secrets_and_purposes_differ() -> None:
    derived = {Secret(text).derive(use) for text in (TEXT, TEXT + "x") for use in ("server", "client")}
    assert len(derived) == 4 and all(len(key) == 32 for key in derived)
    assert Secret(TEXT).derive("server") == Secret(f"  {TEXT}\n").derive("server")
