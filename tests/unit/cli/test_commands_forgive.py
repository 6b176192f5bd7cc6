"""What the command line says to a mistake, and that its help fits a screen."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchquorum.cli.command_list import COMMANDS, commands
from torchquorum.errors import TorchQuorumError

SCREEN = 53  # lines; the longest, train's, has as many


def call(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments), prog_name="torchquorum", terminal_width=80)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_a_screen_and_shows_examples(command: str | None) -> None:
    shown = call(*([command] if command else []), "--help").output
    lines = shown.rstrip("\n").split("\n")
    assert len(lines) <= (28 if command is None else SCREEN), shown
    assert max(map(len, lines)) <= 84
    assert "Examples:" in shown and f"torchquorum {command or 'train'}" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean train?"),
        (["stats"], "did you mean status?"),
        (["chekpoints", "x"], "did you mean checkpoints?"),
        (["zzzz"], "the commands are train, run"),
        (["train", "--rul", "sync"], "did you mean --rule?"),
        (["train", "--optimizer", "Adamm"], "torch.optim has no such class; did you mean Adam?"),
        (["train", "--worker", "3"], "did you mean --workers?"),
        (["train", "--batchsize=3"], "did you mean --batch-size?"),
        (["train", "--rule", "sinc"], "did you mean sync?"),
        (["train", "--rule", "bounded"], "it needs a number, such as bounded:3"),
        (["train", "--rule", "sync:4of3"], "4 of 3 is more than all"),
        (["train", "--model", "mpl"], "did you mean mlp?"),
        (["train", "--transport", "smh"], "did you mean shm?"),
        (["train", "--placement", "gredy"], "did you mean greedy?"),
        (["train", "--slow", "worker1"], "must look like worker1:3x"),
        (["train", "--slow", "worker1:0.5x"], "must be from 1x"),
        (["train", "--steps", "many"], "'many' is not a valid integer"),
        (["run", "--max-restart=1", "x.py"], "did you mean --max-restarts?"),
        (["compare", "--rule", "sync"], "did you mean --rules?"),
        (["report"], "Missing argument 'RUN'"),
        (["doctor", "--ps_hsots=a:1"], "did you mean --ps_hosts?"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(arguments: list[str], said: str) -> None:
    done = call(*arguments)
    message = str(done.exception) if isinstance(done.exception, TorchQuorumError) else done.output
    assert said in message and done.exit_code != 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--slow", "worker2:3x"], "there is no worker 2; with 2 workers"),
        (["train", "--rule", "sync:2of3"], "is for 3 workers, and there are 2"),
        (["train", "--seconds", "-1"], "--seconds -1: must be more than 0"),
        (["train", "--data", "nowhere"], "no such folder"),
        (["train", "--logdir", "/proc/run"], "cannot be written to: No such file or directory below /proc"),
        (["train", "--logdir", "/etc/hostname/run"], "/etc/hostname/run cannot be written to: Not a directory"),
        (["train", "--device", "cuda:77"], "there is no such device here. Available: /job:worker/task:0/device:CPU:0"),
        (["train", "--job_name='ps'", "--ps_host", "localhost:", "2222"], "--worker_hosts"),
        (["compare", "--rules", "sync,,asinc"], "did you mean async?"),
        (["compare", "--rules", " , "], "name at least one rule"),
        (["compare", "--rules", "sync:2of4"], "is for 4 workers, and there are 3"),
        (["compare", "onlyone"], "name at least two folders"),
        (["report", "nowhere"], "no such folder"),
        (["status", "localhost"], "has no port"),
        (["status", "localhost:2222", "--timeout=0"], "--timeout 0: must be more than 0"),
        (["doctor", "--ps_hosts=localhost:1", "--timeout=-1"], "must be more than 0"),
    ],
)
def test_what_is_not_allowed_is_an_error_of_ours_and_no_traceback(arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert isinstance(done.exception, TorchQuorumError), done.output
    assert said in str(done.exception)


def test_names_are_understood_in_quotes_and_any_case(tmp_path: Path) -> None:
    done = call("'train'", "--model", "'MLP'", "--placement='Round-Robin'", "--data", str(tmp_path / "no"))
    assert "no such folder" in str(done.exception)


def test_the_version_is_shown() -> None:
    assert re.fullmatch(r"torchquorum, version \S+\n", call("--version").output)


@pytest.mark.parametrize(("typed", "offered"), [("st", "status"), ("train --ru", "--rule")])
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = f"torchquorum {typed}"
    variables = {
        "_TORCHQUORUM_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = CliRunner(env=variables).invoke(commands, [], prog_name="torchquorum")
    assert offered in [line.removeprefix("plain,") for line in done.output.split()]
