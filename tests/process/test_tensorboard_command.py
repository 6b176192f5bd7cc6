"""A training with summaries, then `torchquorum board` on it: the real TensorBoard, its data and its page."""

import json
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.process.browser import Browser, browser  # noqa: F401  (a fixture)
from tests.process.tasks import TORCHQUORUM, Started
from tests.process.tasks import run as torchquorum

PROGRAM = """
import sys
import torch
import torchquorum as tq
from torchquorum.jobs.models import MLP, evaluate

task = tq.join()
torch.manual_seed(0)
mnist = tq.data.load_mnist()
model = MLP()
optimizer = tq.Optimizer(
    torch.optim.SGD(model.parameters(), lr=0.3),
    rule=tq.Sync(),
    schedule=tq.ExponentialDecay(decay_steps=200, decay_rate=0.9),
    average=tq.ExponentialMovingAverage(0.99),
)
source = tq.Batches(mnist.train, 100, worker=task.index, workers=task.num_workers)
hooks = [
    tq.EvaluateHook(100, lambda model: {"accuracy": evaluate(model, mnist.test)[1]}),
    tq.SummaryHook(every_steps=20, example=torch.zeros(100, 784)),
]
with (
    tq.data.Prefetcher(source) as batches,
    tq.Session(task, model, optimizer, logdir=sys.argv[1], last_step=int(sys.argv[2]), data=batches, hooks=hooks) as session,
):
    while not session.should_stop():
        x, y = next(batches)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
"""
STEPS = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with summaries in it."""
    folder = tmp_path_factory.mktemp("board")
    script = folder / "train.py"
    script.write_text(PROGRAM)
    done = torchquorum("run", "--workers=2", str(script), str(folder / "run"), str(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"After {STEPS} training step(s),validation accuracy using average model is 0.9" in done.stdout
    return folder / "run"


@contextmanager
def serving(run: Path) -> Iterator[tuple[str, Started]]:
    """`torchquorum board` on a run; yields its address."""
    started = Started([*TORCHQUORUM, "board", str(run), "--port=0", "--no-open"])
    try:
        line = started.until("TensorBoard for")
        yield line.split(": ")[1].split()[0].rstrip("/"), started
    finally:
        started.end()


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return json.load(answer)


def until_loaded(address: str) -> Any:
    """Waits until TensorBoard has read the files; returns the tags of the scalars."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        tags = get(f"{address}/data/plugin/scalars/tags").get(".", {})
        if "accuracy" in tags:
            return tags
        time.sleep(0.2)
    raise AssertionError("TensorBoard shows no accuracy after 30 s")


def test_the_board_serves_what_the_run_wrote_and_ends_on_ctrl_c(run: Path) -> None:
    with serving(run) as (address, started):
        tags = until_loaded(address)
        assert get(f"{address}/data/runs") == ["."]
        assert {"loss", "learning_rate", "global_steps_per_s", "examples_per_s", "quorum_wait/worker_1"} <= set(tags)
        points = get(f"{address}/data/plugin/scalars/scalars?run=.&tag=accuracy")
        assert [step for _, step, _ in points] == [100, 200, 300, 400]
        assert points[-1][2] > 0.9
        assert "variables/fc1.weight" in get(f"{address}/data/plugin/histograms/tags")["."]
        assert get(f"{address}/data/plugin/graphs/info")["."]["run_graph"]
        assert "configuration/text_summary" in get(f"{address}/data/plugin/text/tags")["."]
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 0
        assert started.lines[-1] == "TensorBoard has ended" and "Traceback" not in started.tail()


def test_a_folder_without_events_gets_a_clear_message(tmp_path: Path) -> None:
    empty, nowhere = torchquorum("board", str(tmp_path)), torchquorum("board", str(tmp_path / "nowhere"))
    assert empty.returncode == nowhere.returncode == 2
    assert "holds no TensorBoard events" in empty.stderr and "tq.SummaryHook()" in empty.stderr
    assert "no such folder" in nowhere.stderr
    assert "Traceback" not in empty.stderr + nowhere.stderr


def test_a_port_in_use_is_named_with_its_holder(run: Path) -> None:
    (port,) = free_ports(1)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        done = torchquorum("board", str(run), f"--port={port}", "--host=127.0.0.1", "--no-open")
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use, held by process" in done.stderr and "--port 0" in done.stderr


# All text that the page shows, inside shadow roots too.
TEXT = """
const walk = node => (node.nodeType === 3 ? node.data : '')
  + [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes].map(walk).join(' ');
return walk(document.body)"""


# Opens the model's node in the graph, as a click on its plus sign does.
EXPAND = """
let found = null;
const walk = node => {
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.children) {
    if (child.tagName === 'g' && child.getAttribute('data-name') === 'MLP') found = child.querySelector('.buttoncontainer');
    walk(child);
  }
};
walk(document.body);
if (found) found.dispatchEvent(new MouseEvent('click', {bubbles: true, composed: true}));
return found !== null"""


def test_the_page_shows_scalars_histograms_graph_and_configuration(
    run: Path,
    browser: Browser,  # noqa: F811
    tmp_path: Path,
) -> None:
    pages = {
        "timeseries": ("accuracy", "learning_rate", "400"),
        "scalars": ("accuracy", "batches_per_s/worker_1"),
        "histograms": ("variables/fc1.weight", "gradients/fc2.bias"),
        "graphs": ("Linear[fc1]", "Linear[fc2]"),
        "text": ("configuration", "Sync()", "ExponentialDecay"),
    }
    with serving(run) as (address, _):
        until_loaded(address)
        for plugin, words in pages.items():
            browser.open("about:blank")
            browser.open(f"{address}/#{plugin}")
            if plugin == "graphs":
                browser.until(EXPAND)
            for word in words:
                browser.until(f"{TEXT}.includes({json.dumps(word)})")
            browser.screenshot(tmp_path / f"{plugin}.png")
            assert (tmp_path / f"{plugin}.png").stat().st_size > 10_000
