"""`torchquorum compare` and `torchquorum report` on real runs, and their pages in a real browser."""

import json
import os
import pty
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.ports import free_ports
from tests.process.browser import Browser, browser  # noqa: F401  (a fixture)
from tests.process.tasks import FORKING, TORCHQUORUM, Started, by_hand, run
from tests.process.zygote import fork_in_terminal


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two rules with a slowed worker."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    arguments = ["--rules=sync,sync:2of3", "--slow=worker1:6x", "--steps=300", "--model=softmax", f"--output={folder}"]
    done = run("compare", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Worker 1 was the slow one" in done.stdout and f"{folder}/compare.png" in done.stdout
    return folder


def test_compare_trains_each_rule_on_the_same_budget_with_a_slow_worker(compared: Path) -> None:
    sync, backup = json.loads((compared / "compare.json").read_text())
    assert (sync["rule"], backup["rule"]) == ("Sync()", "Sync(aggregate=2)")
    assert sync["updates"] == backup["updates"] == 300
    assert sync["wasted"] == 0 and backup["wasted"] > 0 and set(backup["refused"]) <= {"stale", "already in round"}
    assert sync["waiting_share"] > backup["waiting_share"]
    assert sync["accuracy"] > 0.8 and backup["accuracy"] > 0.8
    with Image.open(compared / "compare.png") as image:
        assert image.width > 2000
    again = run("compare", "--rules=sync", f"--output={compared}")
    assert again.returncode == 2 and "already exists" in again.stderr


def test_report_writes_a_page_about_a_run_and_says_what_is_missing(compared: Path, tmp_path: Path) -> None:
    done = run("report", str(compared / "sync"), "--output", str(tmp_path / "page.html"))
    assert done.returncode == 0 and "wrote" in done.stdout, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert "Worker 1 is the straggler" in text and "updates/s" in text and "model.ckpt-300" in text
    (compared / "sync" / "report.json").write_text("{ torn")
    done = run("report", str(compared / "sync"), "--output", str(tmp_path))
    assert done.returncode == 0 and "report.json cannot be read" in done.stdout
    assert (tmp_path / "report.html").is_file()


# Whether a text of the page is hidden, empty or beyond the page's edge; whether two texts of one chart overlap.
LOOK = """
const bad = [];
for (const svg of document.querySelectorAll('svg')) {
  const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent).map(t => [t.textContent, t.getBoundingClientRect()]);
  for (const [text, b] of boxes) {
    if (b.width < 1 || b.right > innerWidth + 1 || b.left < -1) bad.push('outside: ' + text);
  }
  boxes.forEach(([s, a], i) => boxes.slice(i + 1).forEach(([t, b]) => {
    const w = Math.min(a.right, b.right) - Math.max(a.left, b.left), h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (w > 1.5 && h > 4) bad.push('overlap in ' + svg.getAttribute('aria-label') + ': ' + s + ' / ' + t);
  }));
}
if (document.documentElement.scrollWidth > innerWidth + 1) bad.push('the page is wider than the window');
return bad"""
COLOURS = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
POINT = """
const svg = document.querySelector('svg[data-axes]'), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
return document.querySelector('.tip').textContent"""


@pytest.mark.parametrize("kind", ["report", "compare"])
def test_the_pages_open_in_a_browser_without_errors_or_requests(
    kind: str,
    compared: Path,
    tmp_path: Path,
    browser: Browser,  # noqa: F811
) -> None:
    page = compared / "compare.html"
    if kind == "report":
        page = tmp_path / "report.html"
        assert run("report", str(compared / "sync-2of3"), f"--output={page}").returncode == 0
    browser.requests()
    browser.open(page.as_uri())
    assert browser.run("return document.querySelectorAll('svg polyline[data-name]').length") >= 4
    assert browser.run("return document.querySelectorAll('svg').length") >= 9
    text = browser.run("return document.body.innerText")
    assert "worker" in text.lower() and "updates" in text
    dresses = {}
    for scheme in ("light", "dark"):
        browser.dress(scheme)
        dresses[scheme] = tuple(browser.run(COLOURS))
        for width in (1340, 820, 400):
            browser.resize(width, 1000)
            assert browser.run(LOOK) == []
    assert dresses["light"] != dresses["dark"]
    assert ":" in browser.run(POINT)
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.console() == []
    left = [
        url for url in browser.requests() if url.startswith(("http", "ws", "ftp"))
    ]  # its own new tab asks chrome://
    assert left == []


def _in_terminal(command: list[str], columns: int, lines: int) -> tuple[int, str]:
    """Runs a command in a pseudo-terminal of a size; returns its exit code and all it wrote."""
    here, there = pty.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    environment.pop("LINES", None)
    process = fork_in_terminal(command, environment, there)
    os.close(there)
    seen = b""
    try:
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        return process.wait(60), seen.decode(errors="replace")
    finally:
        os.close(here)
        if process.poll() is None:
            process.kill()
            process.wait(60)


def test_in_a_terminal_training_shows_a_bar_and_a_row_per_worker(tmp_path: Path) -> None:
    arguments = ["--model=softmax", "--steps=250", "--slow=worker1:2x", f"--logdir={tmp_path / 'run'}"]
    code, seen = _in_terminal([*FORKING, "train", *arguments], 110, 24)
    assert code == 0, seen
    for words in ("global step", "of 250", "2 of 2 workers live", "batches/s", "worker 0", "worker 1", "test accuracy"):
        assert words in seen, seen


def test_status_watches_a_cluster_from_outside_until_it_is_gone() -> None:
    with by_hand() as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, "--steps=100000", "--pause=0.01")
        chief.until("local 5 ")
        host, port = cluster.ps_hosts.split(":")
        command = [*TORCHQUORUM, "status", f"'{host}:", port, "--watch", "--every=0.2", "--timeout=2"]
        watching = Started(command, forked=True)
        try:
            watching.until("global step")
            watching.until("live workers 1 of 2")
            chief.kill()
            ps.kill()
            watching.until("ps task 0 is gone")
            assert watching.wait() == 1
        finally:
            watching.end()


def _doctor(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = run("doctor", "--json", *arguments)
    assert done.stdout, f"exit code {done.returncode}: {done.stderr}"
    return done.returncode, {f["name"]: f for f in json.loads(done.stdout)}


def test_the_doctor_tells_what_stands_in_the_way_and_what_to_do(tmp_path: Path) -> None:
    nobody, later = free_ports(2)
    server = Started([sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"])
    try:
        port = int(server.until("Serving HTTP on").split(" port ")[1].split()[0])
        with by_hand() as cluster:
            cluster.start("ps", 0).until("serving on")
            hosts = f"{cluster.ps_hosts},127.0.0.1:{nobody},localhost: {port},no-such-host.invalid:2222"
            code, found = _doctor(f"--ps_host={hosts}", f"--worker_hosts=localhost:{later}", f"--logdir={tmp_path}")
    finally:
        server.end()
    assert code == 1
    assert {n: f["level"] for n, f in found.items() if n in ("torch", "packages", "local ports", "run folder")} == {
        "torch": "ok", "packages": "ok", "local ports": "ok", "run folder": "ok",
    }  # fmt: skip
    assert found["ps 0"]["level"] == "ok" and "it waits for the chief" in found["ps 0"]["found"]
    assert "connection refused" in found["ps 1"]["found"] and "start the ps task" in found["ps 1"]["advice"]
    assert "something else answers there" in found["ps 2"]["found"] and "http.server" in found["ps 2"]["found"]
    assert "cannot be resolved" in found["ps 3"]["found"] and "/etc/hosts" in found["ps 3"]["advice"]
    assert found["worker 0"]["level"] == "ok"
    assert all(f["advice"] for f in found.values() if f["level"] != "ok")


def test_the_doctor_fails_for_a_run_folder_that_is_a_file_and_reads_tf_config(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (nobody,) = free_ports(1)
    config = {
        "cluster": {"ps": [f"127.0.0.1:{nobody}"], "worker": ["127.0.0.1:9"]},
        "task": {"type": "worker", "index": 0},
    }
    done = run("doctor", f"--logdir={tmp_path / 'file' / 'run'}", forked=False, env={"TF_CONFIG": json.dumps(config)})
    assert done.returncode == 1
    assert "is not a folder" in done.stdout and "connection refused" in done.stdout
    assert "prevent training" in done.stdout and "Traceback" not in done.stderr
