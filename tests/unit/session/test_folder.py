"""The run's folder: a chief does not begin in one that a living run writes into."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchquorum.errors import ConfigError
from torchquorum.session.folder import check_free

HOLDS = (
    "import sys; from pathlib import Path; from torchquorum.formats.ledger_write import LedgerWriter; "
    "held = LedgerWriter(Path(sys.argv[1])); print('held', flush=True); sys.stdin.readline(); held.close()"
)


def test_a_folder_in_use_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    said: list[str] = []
    check_free(None, pytest.fail)
    check_free("memory://run", pytest.fail)
    check_free(str(tmp_path), pytest.fail)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=rf"logdir='{tmp_path}': another run .*process {other.pid} .*another logdir"
        ):
            check_free(str(tmp_path), said.append, wait_s=0.3)
        assert len(said) == 1 and f"is in use by another run (process {other.pid})" in said[0]

        def end(line: str) -> None:
            other.stdin.write("\n")  # type: ignore[union-attr]
            other.stdin.flush()  # type: ignore[union-attr]

        check_free(str(tmp_path), end, wait_s=60.0)  # it ends while we wait
        assert other.wait(60) == 0
