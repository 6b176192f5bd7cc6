"""`torchquorum train`, `run` and `status` as a user runs them."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.process.tasks import DEADLINE_S, FORKING, PROGRAM, TORCHQUORUM, Started, by_hand, run
from tests.process.zygote import run_python
from torchquorum.formats.ledger import Event, read_ledger, read_records
from torchquorum.jobs.models import make_model

REPORT = {
    "rule", "ps", "workers", "transport", "updates", "batches", "seconds", "batches_per_s", "loss", "accuracy",
    "refused", "staleness_mean", "staleness_max", "start_up_s", "per_worker",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "rule", "transport"),
    [
        (["--rule=sync"], "Sync()", "shm"),
        (["--rule=async", "--transport=tcp", "--model=softmax", "--decay_rate=0.99", "--l2=1e-4"], "Async()", "tcp"),
        (["--rule=sync:2", "--ps=2", "--workers=3", "--optimizer=Adam", "--lr=0.001"], "Sync(aggregate=2)", "shm"),
        (["--rule=bounded:2", "--batch-size=20", "--lr=0.1", "--steps=40"], "Bounded(2)", "shm"),
    ],
)
def test_train_learns_and_reports(options: list[str], rule: str, transport: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    forked = options != ["--rule=sync"]  # which is started as a user starts it
    done = run("train", "--steps=150", f"--report={report}", f"--logdir={tmp_path / 'run'}", *options, forked=forked)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(report.read_text())
    assert set(body) >= REPORT
    steps = 40 if "--steps=40" in options else 150
    assert (body["rule"], body["transport"], body["updates"]) == (rule, transport, steps)
    assert body["accuracy"] > (0.8 if steps == 150 else 0.2)
    assert body["batches"] >= steps and body["batches_per_s"] > 0 and body["start_up_s"] > 0
    for worker in body["per_worker"].values():
        assert {"updates", "batches", "loss", "accuracy", "refused", "staleness_mean", "start_up_s"} <= set(worker)
    entries = list(read_ledger(tmp_path / "run"))
    assert len(entries) == body["batches"]
    assert sum(not e.accepted for e in entries) == body["refused"]
    start = json.loads((tmp_path / "run" / "start.json").read_text())
    assert start["batch_size"] == (20 if "--batch-size=20" in options else 100) and start["seed"] == 0
    assert start["command"].startswith("torchquorum ") and "--steps=150" in start["command"]
    assert start["versions"]["torch"] == torch.__version__ and start["host"]
    assert list((tmp_path / "run").glob("*.tfevents.*"))
    assert f"test accuracy {100 * body['accuracy']:.2f} %" in done.stdout
    assert "run folder" in done.stdout and "try next      torchquorum train --rule" in done.stdout


def test_a_run_writes_tensorboards_events_unless_told_not_to(tmp_path: Path) -> None:
    for extra, files in ([], 1), (["--no-events"], 0):
        folder = tmp_path / f"run{files}"
        done = run("run", *extra, f"--logdir={folder}", str(PROGRAM), "--steps=10")
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(list(folder.glob("*.tfevents.*"))) == files


def test_run_starts_anybodys_script_with_its_own_arguments(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = [str(PROGRAM), "--steps=30", "--rule", "async"]
    done = run("run", "--ps", "1", "--workers=2", f"--report={report}", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    for index in range(2):
        assert f"[worker {index}] done at 30" in done.stdout
    assert json.loads(report.read_text())["updates"] == 30


def test_a_script_that_never_joins_is_an_error_and_not_three_copies_that_train_alone(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("print('trained')\n")
    done = run("run", str(script))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "alone.py ended on /job:ps/task:0 without calling tq.join()" in done.stdout
    assert done.stdout.count("Put `task = tq.join()` at its beginning") == 1


INTERRUPTED = """
import os, signal, time
if "{moment}" == "import":
    with open(f"began-{{os.getpid()}}", "w"):
        if len([name for name in os.listdir() if name.startswith("began")]) == 3:
            os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
import torch, torchquorum as tq
task = tq.join()
model = torch.nn.Linear(2, 1)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if "{moment}" == "join" and task.is_chief:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
with tq.Session(task, model, optimizer, logdir="run", last_step=3000) as session:
    while not session.should_stop():
        if "{moment}" == "loop" and task.is_chief and session.global_step == 20:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.01)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step(loss=loss)
"""


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        ("import", "torchquorum: stopped before the run began: nothing was trained, and nothing is lost"),
        ("join", "torchquorum: stopped before the run began: nothing was trained, and nothing is lost"),
        ("loop", "torchquorum: stopped at step NN of 3,000, saved; the same command goes on"),
    ],
)
def test_ctrl_c_at_any_moment_leaves_no_traceback_and_says_where_the_run_is(
    moment: str, last: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED.format(moment=moment))
    done = run("run", "--workers=2", str(script), cwd=tmp_path)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert re.sub(r"step \d+", "step NN", done.stdout.splitlines()[-1]) == last, done.stdout


def test_a_failed_run_has_one_root_cause_and_every_traceback_once(tmp_path: Path) -> None:
    done = run("run", "--workers=2", str(PROGRAM), "--fail-at=3")
    said = done.stdout
    assert done.returncode == 1 and said.count("Traceback") == 1, said
    cause = next(line for line in said.splitlines() if "the run failed:" in line)
    assert re.search(r"/job:worker/task:[01]: program.py, line \d+: RuntimeError: told to fail$", cause), said
    assert "/job:ps/task:0 failed" not in said


def test_run_fails_when_the_script_does(tmp_path: Path) -> None:
    done = run("run", "--workers=1", str(PROGRAM), "--fail-at=3")
    assert done.returncode == 1
    assert "told to fail" in done.stdout and "/job:worker/task:0 failed with exit code 1" in done.stdout


@pytest.mark.parametrize("example", ["train_quorum.py", "train_torch.py"])
def test_the_examples_train(example: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "mnist" / example
    command = [sys.executable, str(script)] if "torch" in example else [*FORKING, "run", str(script)]
    done = run_python([*command, "--steps", "120"], os.environ, timeout_s=DEADLINE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout


def test_the_two_examples_differ_by_a_handful_of_lines() -> None:
    folder = Path(__file__).parents[2] / "examples" / "mnist"
    plain, quorum = ({*(folder / n).read_text().split("\n")} for n in ("train_torch.py", "train_quorum.py"))
    stripped = {line.strip() for line in plain}
    assert len([line for line in quorum if line.strip() not in stripped]) <= 14


def test_status_shows_a_running_cluster_and_says_when_there_is_none() -> None:
    with by_hand() as cluster:
        nobody = run("status", cluster.ps_hosts, "--timeout=0.5")
        assert nobody.returncode == 2 and "no answer from" in nobody.stderr
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, "--steps=100000", "--pause=0.01")
        chief.until("local 5 ")
        shown = run("status", f" '{cluster.ps_hosts}' ")
        assert "worker 0  computing" in shown.stdout or (
            "worker 0  waiting" in shown.stdout and "of 100000" in shown.stdout
        ), shown.stderr
        body = json.loads(run("status", cluster.ps_hosts, "--json").stdout)
        assert body["live"] == [0] and body["rule"] == "Sync()"
        assert ps.process.poll() is None


@pytest.fixture
def patient(tmp_path: Path) -> Path:
    """A program that any task runs for ten minutes, without a second to import torch."""
    program = tmp_path / "patient.py"
    program.write_text("import time\nprint('patient', flush=True)\ntime.sleep(600)\n")
    return program


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_launcher_ends_every_task(sign: signal.Signals, patient: Path) -> None:
    started = Started([*TORCHQUORUM, "run", str(patient)])
    try:
        for _ in range(3):
            started.until("] patient")
        children = _children(started.process.pid)
        assert len(children) == 3
        started.process.send_signal(sign)
        assert started.wait() == 130, started.tail()
        assert not any(_alive(pid) for pid in children)
    finally:
        started.end()


def test_interrupting_the_launcher_before_the_run_began_ends_every_task_in_seconds() -> None:
    started = Started([*FORKING, "run", str(PROGRAM), "--steps=1000000", "--chief-late=600"], forked=True)
    try:
        started.until("[worker 0] coming 600 s late")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130, started.tail()
    finally:
        started.end()


def test_killing_the_launcher_leaves_no_task_behind(patient: Path, tmp_path: Path) -> None:
    # What it keeps in a temporary folder, the next command removes.
    started = Started([*TORCHQUORUM, "run", str(patient)], env={"TMPDIR": str(tmp_path)})
    try:
        started.until("[worker 1] patient")
        children = _children(started.process.pid)
        assert len(children) == 3
        started.kill()
        deadline = time.monotonic() + DEADLINE_S
        while any(_alive(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(_alive(pid) for pid in children)
    finally:
        started.end()


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "did you mean train"),
        (["train", "--rul=sync"], "--rule"),
        (["train", "--rule=asink"], "did you mean async"),
        (["train", "--model=mpl"], "mlp"),
        (["train", "--steps=0"], "must be 1 or more"),
        (["train", "--transport=carrier-pigeon"], "auto, shm, tcp"),
        (["train", "--data=/nowhere"], "no such folder"),
        (["train", "--placement=random"], "round_robin, greedy"),
        (["run", "nothing.py"], "no such file"),
        (["run", "--ps=0", str(PROGRAM)], "must be 1 or more"),
        (["status", "localhost"], "port"),
    ],
)
def test_mistakes_get_a_message_and_no_traceback(arguments: list[str], expected: str) -> None:
    done = run(*arguments, forked=arguments != ["trian"])
    assert done.returncode == 2
    shown = done.stdout + done.stderr
    assert expected in shown and "Traceback" not in shown


def test_checkpoints_are_listed_and_exported_as_a_plain_state_dict(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run("train", "--steps=60", f"--logdir={folder}", "--average=0.9", "--ps=2", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    again = run("train", "--steps=90", f"--logdir={folder}", "--average=0.9", "--workers=1")
    assert "restoring" in again.stdout and "(global step 60)" in again.stdout, again.stdout + again.stderr
    listed = run("checkpoints", str(folder), "--verify")
    assert listed.returncode == 0 and "model.ckpt-60" in listed.stdout and "model.ckpt-90" in listed.stdout
    plain, averaged = tmp_path / "plain.safetensors", tmp_path / "averaged.pt"
    assert run("export", str(folder), str(plain)).returncode == 0
    assert run("export", str(folder), str(averaged), "--averages").returncode == 0
    first, second = load_file(plain), torch.load(averaged, weights_only=True)
    for state in (first, second):
        make_model("mlp").load_state_dict(state)
    assert not torch.equal(first["fc1.weight"], second["fc1.weight"])
    next((folder / "model.ckpt-90").glob("*.safetensors")).write_bytes(b"damaged")
    listed = run("checkpoints", str(folder))
    assert listed.returncode == 1 and "model.ckpt-90" in listed.stdout
    old = run("export", str(folder), str(plain))
    assert old.returncode == 0 and "from model.ckpt-60" in old.stdout and "skipping" in old.stderr
    assert run("export", str(tmp_path / "nothing"), str(plain)).returncode == 2


def test_a_chief_that_fails_before_it_has_made_the_variables_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torchquorum as tq, torch\n"
        "task = tq.join()\n"
        "assert not task.is_chief, 'told to fail'\n"
        "model = torch.nn.Linear(1, 1)\n"
        "with tq.Session(task, model, tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))):\n"
        "    pass\n"
    )
    started = Started([*FORKING, "run", str(script)], forked=True)
    try:
        assert started.wait() == 1, started.tail()
        assert any(
            "failed before all workers had joined the run: ending the other tasks" in line for line in started.lines
        ), started.tail()
    finally:
        started.end()


def test_under_auto_a_slow_worker_is_left_out_and_the_ledger_says_so(tmp_path: Path) -> None:
    """On two ps tasks, which must agree on what each update was made of."""
    report = tmp_path / "report.json"
    options = ["--rule=sync:auto:2", "--ps=2", "--workers=3", "--slow=worker1:30x", "--steps=60", f"--report={report}"]
    done = run("train", *options, f"--logdir={tmp_path / 'run'}", forked=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = list(read_records(tmp_path / "run"))
    chosen = [r.values["aggregate"] for r in records if isinstance(r, Event) and r.event == "chose"]
    assert chosen[:1] == [2], chosen
    assert "an update takes 2 gradients of 3 workers from now on" in done.stdout
    body = json.loads(report.read_text())
    assert (body["rule"], body["updates"]) == ("Sync(aggregate='auto', floor=2)", 60)
    assert body["per_worker"]["1"]["updates"] < 30 <= body["per_worker"]["0"]["updates"]
