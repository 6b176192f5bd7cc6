"""`torchquorum run --on ray` on a real Ray: several machines, each a raylet with an address of its own, on this one."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.ray_machines import Machines
from tests.process.tasks import PROGRAM, TORCHQUORUM, Started, run
from torchquorum import env
from torchquorum.cluster.secret import make_secret
from torchquorum.formats.checkpoint import newest_good

pytest.importorskip("ray", reason="needs Ray: pip install 'torchquorum[ray]'")
DEADLINE_S = 350.0  # as for all tasks, and Ray's own processes have to start as well
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A Ray cluster: a first machine without CPUs for tasks, with its dashboard, and one with 4."""
    found = Machines(dashboard=True)
    try:
        found.add(4, gpus=2)
        yield found
    finally:
        found.close()


@pytest.fixture
def started(machines: Machines) -> Iterator[Callable[..., Started]]:
    """Starts `torchquorum run --on ray` on the cluster; whatever happens, it ends with the test."""
    all_of_them: list[Started] = []

    def start(*arguments: str, variables: dict[str, str] | None = None) -> Started:
        words = [*TORCHQUORUM, "run", "--on", "ray", "--address", machines.address, *arguments]
        all_of_them.append(Started(words, {**QUIET, **(variables or {})}))
        return all_of_them[-1]

    yield start
    for process in all_of_them:
        process.end()


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:.0f} s"
        time.sleep(0.1)


def processes(job: str, index: int) -> dict[int, dict[str, str]]:
    """Returns the processes that are a task of a run of this test, with their environment, by number."""
    found: dict[int, dict[str, str]] = {}
    for entry in Path("/proc").iterdir():
        try:
            raw = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        parts = [part.partition("=") for part in raw.decode(errors="replace").split("\0")]
        variables = {name: text for name, _, text in parts}
        task = json.loads(variables.get(env.TASK) or "{}")
        ours = variables.get("TORCHQUORUM_TEST_OWNER") == str(os.getpid())
        if ours and (task.get("job"), task.get("index")) == (job, index):
            found[int(entry.name)] = variables
    return found


def command_lines() -> bytes:
    """Returns the command lines of all processes of this machine."""
    found: list[bytes] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_bytes() if entry.name.isdigit() else b"")
    return b"\n".join(found)


@pytest.mark.on_ray
def test_a_run_on_ray_has_its_secret_and_a_killed_worker_comes_back(
    machines: Machines, started: Callable[..., Started], tmp_path: Path
):
    secret, report, end = tmp_path / "secret", tmp_path / "report.json", tmp_path / "end"
    secret.write_text(make_secret())
    secret.chmod(0o600)
    options = ["--ps", "2", "--workers", "2", "--report", str(report), "--secret-file", str(secret)]
    ran = started(
        "--gpus-per-worker", "1", *options, str(PROGRAM), "--steps", "100000", "--pause", "0.05", "--until", str(end)
    )
    status = (
        ran.until("for the status of the run: torchquorum status ", DEADLINE_S).split("torchquorum status ")[1].split()
    )
    ran.until("[worker 1] local 5 ", DEADLINE_S)
    ((victim, variables),) = processes("worker", 1).items()
    assert variables[env.SECRET] == secret.read_text() and env.SECRET_FILE not in variables
    ((_, of_chief),) = processes("worker", 0).items()
    assert {variables["CUDA_VISIBLE_DEVICES"], of_chief["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    asked = run("status", *status, "--json")
    assert json.loads(asked.stdout)["workers"] == 2
    commands = command_lines()
    assert str(PROGRAM).encode() in commands and b"raylet" in commands and b"ray::" in commands
    assert secret.read_bytes() not in commands
    told = machines.told()
    assert "TaskHost" in told and secret.read_text() not in told
    os.kill(victim, signal.SIGKILL)
    ran.until("/job:worker/task:1 was ended by SIGKILL; restarting it (1 of 3)", DEADLINE_S)
    ran.until("/job:worker/task:1 came back", DEADLINE_S)
    end.touch()
    assert ran.wait(DEADLINE_S) == 0, ran.tail()
    assert any("[worker 0] done at " in line for line in ran.lines)
    assert json.loads(report.read_text())["updates"] > 5
    assert machines.left() == []
    said = "\n".join(ran.lines).encode() + b"".join(
        path.read_bytes() for path in Path(machines.folder).rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert secret.read_bytes() not in said


@pytest.mark.on_ray
def test_a_script_that_fails_ends_the_run_as_it_does_locally(machines: Machines, started: Callable[..., Started]):
    arguments = ("--workers", "2", str(PROGRAM), "--steps", "100000", "--fail-at", "3")
    here, there = run("run", *arguments), started(*arguments)
    assert there.wait(DEADLINE_S) == here.returncode == 1
    for expected in ("RuntimeError: told to fail", "torchquorum: /job:worker/task:0 failed with exit code 1"):
        assert expected in here.stdout and any(expected in line for line in there.lines), there.tail()
    assert machines.left() == []


@pytest.mark.on_ray
def test_ctrl_c_saves_and_leaves_nothing(machines: Machines, started: Callable[..., Started], tmp_path: Path):
    ran = started(str(PROGRAM), "--steps", "100000", "--pause", "0.02", "--logdir", str(tmp_path))
    ran.until("[worker 1] local 5 ", DEADLINE_S)
    ran.process.send_signal(signal.SIGINT)
    assert ran.wait(DEADLINE_S) == 130
    assert newest_good(tmp_path)[0] is not None
    assert machines.left() == []


@pytest.mark.on_ray
def test_ctrl_c_ends_programs_that_are_still_starting(
    machines: Machines, started: Callable[..., Started], tmp_path: Path
):
    """A program hears it from its first line on, though Ray's own processes ignore it."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nprint('starting', flush=True)\ntime.sleep(3600)\n")
    ran = started("--workers", "1", str(slow))
    ran.until("[worker 0] starting", DEADLINE_S)
    ran.process.send_signal(signal.SIGINT)
    assert ran.wait(DEADLINE_S) == 130
    assert "[worker 0] KeyboardInterrupt" in ran.lines
    assert machines.left() == []


@pytest.mark.on_ray
def test_workers_of_a_range_are_scaled_and_one_that_leaves_gives_its_place_back(
    machines: Machines, started: Callable[..., Started]
):
    ran = started("--view", "--workers", "1:2", str(PROGRAM), "--steps", "100000", "--pause", "0.05", "--rule", "async")
    words = ran.until("torchquorum scale ", DEADLINE_S).split("torchquorum scale ")[1].split()
    ran.until("[worker 1] local 5 ", DEADLINE_S)
    groups = len(machines.left())
    for wanted, expected in (("1", "asked to leave the run"), ("2", "/job:worker/task:1 came back")):
        asked = run("scale", words[0], wanted, *words[2:])
        assert asked.returncode == 0, asked.stdout + asked.stderr
        ran.until(expected, DEADLINE_S)
        if wanted == "1":
            wait_until(lambda: len(machines.left()) == groups - 2, "an actor and a placement group go with the worker")
    refused = run("scale", words[0], "3", *words[2:])
    assert refused.returncode == 2 and "this run has 1 to 2" in refused.stderr
    ran.process.send_signal(signal.SIGINT)
    assert ran.wait(DEADLINE_S) == 130, ran.tail()
    assert machines.left() == []


@pytest.mark.on_ray
def test_a_killed_ps_comes_back_at_its_address_with_its_checkpoint(
    machines: Machines, started: Callable[..., Started], tmp_path: Path
):
    options = ["--rule", "async", "--steps", "100000", "--pause", "0.02", "--save-steps", "10"]
    ran = started("--workers", "1", str(PROGRAM), *options, "--logdir", str(tmp_path))
    wait_until(lambda: newest_good(tmp_path)[0] is not None, "there is a checkpoint")
    before = ran.until("serving on ", DEADLINE_S).split("serving on ")[1].split()[0]
    ((victim, _),) = processes("ps", 0).items()
    os.kill(victim, signal.SIGKILL)
    ran.until("/job:ps/task:0 was ended by SIGKILL; restarting it (1 of 3)", DEADLINE_S)
    assert ran.until("serving on ", DEADLINE_S).split("serving on ")[1].split()[0] == before
    ran.until("[worker 0] local ", DEADLINE_S)
    ran.process.send_signal(signal.SIGINT)
    assert ran.wait(DEADLINE_S) == 130, ran.tail()
    assert machines.left() == []


@pytest.mark.on_ray
def test_auto_finds_the_cluster_whether_it_wants_a_token_or_not(machines: Machines, tmp_path: Path):
    """A token of another cluster lies in the user's folder, as any `ray.init()` leaves one there; this cluster wants none."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("ab" * 32)
    command = [*TORCHQUORUM, "run", "--on", "ray", "--address", "auto", "--workers", "1", str(PROGRAM), "--steps", "3"]
    ran = Started(command, {**QUIET, "HOME": str(tmp_path), "RAY_ADDRESS": machines.address})
    try:
        assert ran.wait(DEADLINE_S) == 0, ran.tail()
        assert any("[worker 0] done at 3 " in line for line in ran.lines)
    finally:
        ran.end()


@pytest.mark.on_ray
def test_a_launcher_that_is_killed_leaves_nothing(machines: Machines, started: Callable[..., Started]):
    ran = started("--workers", "1", str(PROGRAM), "--steps", "100000", "--pause", "0.02")
    ran.until("[worker 0] local 5 ", DEADLINE_S)
    ran.kill()
    wait_until(lambda: not machines.left(), "Ray removes what was the run's")
    wait_until(lambda: not processes("ps", 0) and not processes("worker", 0), "the tasks die with their actors")
    assert machines.left() == []


@pytest.mark.on_ray
def test_a_lost_machine_sends_the_run_back_to_its_checkpoint_and_a_new_one_starts_who_waits(
    machines: Machines, started: Callable[..., Started], tmp_path: Path
):
    """4 CPUs stay, 3 go: of 2 ps and 3 workers one worker has to wait until there is another machine."""
    lost = machines.add(3)
    options = ["--ps", "2", "--workers", "3", str(PROGRAM), "--rule", "async", "--steps", "100000", "--pause", "0.02"]
    ran = started(*options, "--logdir", str(tmp_path), "--save-steps", "20")
    for place in range(3):
        wait_until(lambda place=place: processes("worker", place), "every worker runs")
    wait_until(lambda: newest_good(tmp_path)[0] is not None, "there is a checkpoint")
    machines.remove(lost)
    ran.until("every task starts again, from the last checkpoint", DEADLINE_S)
    restored = int(ran.until("[worker 0] started at ", DEADLINE_S).split("started at ")[1].split()[0])
    assert restored > 0
    if not any("waits for room" in line for line in ran.lines):
        ran.until("waits for room on the cluster: 1 worker with 1 CPU", DEADLINE_S)
    assert not any("(raylet)" in line or "state-dump" in line for line in ran.lines), ran.tail()
    assert f"torchquorum: Ray has lost the machine {lost}" in ran.lines
    added = machines.add(1)
    ran.until(f" has a place on {added}", DEADLINE_S)
    ran.until(" joined", DEADLINE_S)
    ran.process.send_signal(signal.SIGINT)
    assert ran.wait(DEADLINE_S) == 130, ran.tail()
    assert machines.left() == []
    machines.remove(added)


@pytest.mark.on_ray
def test_what_does_not_fit_is_told_in_time(machines: Machines, started: Callable[..., Started]):
    ran = started("--ps", "9", "--placement-timeout", "1", str(PROGRAM))
    assert ran.wait(DEADLINE_S) == 2
    (error,) = [line for line in ran.lines if "error" in line]
    assert "for 9 ps with 1 CPU each on Ray, and there is no room; the cluster has 2 machines" in error
    assert "ask for less" in error and "--placement-timeout" in error
    assert machines.left() == []


@pytest.mark.on_ray
def test_a_job_that_is_submitted_runs(machines: Machines):
    command = ["-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{machines.dashboard}"]
    job = [sys.executable, "-m", "torchquorum.cli.main", "run", "--on", "ray", "--workers", "1", "program.py"]
    ran = subprocess.run(
        [sys.executable, *command, "--working-dir", str(PROGRAM.parent), "--", *job, "--steps", "5"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **QUIET},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "[worker 0] done at 5 after 5 local steps: 5" in ran.stdout
    wait_until(lambda: not machines.left(), "nothing is left")


@pytest.mark.long
def test_a_function_runs_on_a_ray_that_is_started_for_it(tmp_path: Path):
    program = tmp_path / "notebook.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch
            import torchquorum as tq

            def train(steps):
                task = tq.join()
                model = torch.nn.Linear(2, 1)
                optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                with tq.Session(task, model, optimizer, last_step=steps) as session:
                    while not session.should_stop():
                        optimizer.zero_grad()
                        model(torch.ones(1, 2)).sum().backward()
                        optimizer.step()
                print("worker", task.index, "is done", flush=True)
                return task.index, session.global_step, task.cluster.address(tq.types.TaskId("ps", 0)).split(":")[0]

            print(tq.launch(train, 20, workers=2, on="ray"))
            """
        )
    )
    folder = tempfile.mkdtemp(prefix="tqray", dir="/tmp")  # short, for Ray's sockets
    ran = Started([sys.executable, str(program)], {**QUIET, "RAY_TMPDIR": folder})
    try:
        assert ran.wait(DEADLINE_S) == 0, ran.tail()
        assert "[[0, 20, '127.0.0.1'], [1, 20, '127.0.0.1']]" in ran.lines
        assert "[worker 1] worker 1 is done" in ran.lines
    finally:
        ran.end()
        shutil.rmtree(folder, ignore_errors=True)
