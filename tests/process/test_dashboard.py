"""The live page in a real browser, beside a cluster whose worker is killed and comes back; and who may see it."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.process.browser import Browser, browser  # noqa: F401  (a fixture)
from tests.process.tasks import TORCHQUORUM, Started
from tests.process.test_deaths import task_pid

NOW = "document.getElementById('now').innerText"
BATCHES = "(i => +document.querySelectorAll('#now tbody tr')[i].children[2].innerText.replace(/,/g, ''))"


def get(address: str, *, method: str = "GET", cookie: str = "") -> tuple[int, str]:
    """Asks as a program does; returns the code and the text."""
    request = urllib.request.Request(address, method=method, headers={"Cookie": cookie} if cookie else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address_in(line: str) -> str:
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    return found.group()


def test_the_page_follows_a_run_whose_worker_is_killed_and_comes_back_to_its_end(
    browser: Browser,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = ["--rule", "async", "--steps", "1000000", "--logdir", str(tmp_path / "run"), "--dashboard"]
    run = Started([*TORCHQUORUM, "train", *options])
    try:
        page = address_in(run.until("dashboard  "))
        browser.open(page)
        browser.until(f"return {NOW}.includes('running') && {BATCHES}(0) > 0 && {BATCHES}(1) > 0")
        assert "Async()" in browser.run(f"return {NOW}")
        os.kill(task_pid(run.process.pid, "worker", 1), signal.SIGKILL)
        browser.until(f"return {NOW}.includes('dead') || {NOW}.includes('1 of 2 workers alive')")
        browser.until(f"return {NOW}.includes('2 of 2 workers alive')")
        browser.until("return document.querySelectorAll('#charts svg polyline').length >= 2")
        for width, scheme in ((1200, "light"), (390, "dark")):
            browser.dress(scheme)
            browser.resize(width, 900)
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
            browser.screenshot(tmp_path / f"{scheme}.png")
        code, metrics = get(f"{page}metrics")
        assert code == 200
        assert re.search(r'^torchquorum_workers_alive\{run="this run"\} 2$', metrics, re.M)
        assert float(re.findall(r'^torchquorum_batches_total\{run="this run"\} (\S+)$', metrics, re.M)[0]) > 0
        assert json.loads(get(f"{page}run/0/status.json")[1])["rule"] == "Async()"
        assert get(page, method="POST")[0] == 405
        run.process.send_signal(signal.SIGINT)
        browser.until(f"return {NOW}.includes('the run is over, at global step')")
        assert browser.console() == []
        run.wait()
        browser.until("return document.getElementById('told').innerText.includes('The run is over')")
    finally:
        run.end()


def test_a_cluster_with_a_secret_shows_itself_to_those_who_have_the_key(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of-a-test-and-long-enough-for-a-secret\n")
    page = Started(
        [*TORCHQUORUM, "dashboard", "localhost:1", "--port", "0", "--secret-file", str(secret), "--no-open"],
        forked=True,
    )
    try:
        address = address_in(page.until("http://"))
        plain, _, key = address.partition("?key=")
        assert len(key) == 32 and "of-a-test" not in address
        code, text = get(f"{plain}run/0/")
        assert (code, "with its key" in text) == (401, True)
        assert get(f"{plain}metrics?key={'0' * 32}")[0] == 401
        assert "torchquorum_up" in get(f"{plain}metrics?key={key}")[1]
        code, text = get(f"{plain}run/0/now", cookie=f"torchquorum_key={key}")
        assert (code, "waiting for ps task 0" in text) == (200, True)
        page.process.send_signal(signal.SIGTERM)
        page.until("the dashboard has ended")
        assert page.wait() == 0
    finally:
        page.end()


def test_a_folder_without_its_cluster_has_a_page_too(tmp_path: Path) -> None:
    run = Started([*TORCHQUORUM, "train", "--steps", "30", "--logdir", str(tmp_path), "--quiet"], forked=True)
    assert run.wait() == 0
    page = Started([*TORCHQUORUM, "dashboard", str(tmp_path), "--port", "0", "--no-open"], forked=True)
    try:
        address = address_in(page.until("http://"))
        text = ""
        while "is over" not in text:
            text = get(f"{address}run/0/now")[1]
        assert "the run is over, at global step 30" in text
        assert "model.ckpt-30" in get(f"{address}run/0/charts")[1]
        assert get(f"{address}run/7/")[0] == 404
    finally:
        page.end()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no/such/folder"], "no such folder"),
        (["localhost:99999"], "port"),
        (["localhost:1", "--port", "70000"], "--port 70000"),
    ],
)
def test_what_cannot_be_followed_is_an_error(arguments: list[str], says: str) -> None:
    page = Started([*TORCHQUORUM, "dashboard", *arguments, "--no-open"], forked=True)
    assert page.wait() != 0
    assert says in page.tail()
