"""What the benchmarks keep and say: floors, files, tables, and the pages that are made from them."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("bench", "speed", "bandwidth", "load", "scaling", "decisions", "startup", "memory", "document", "pushers")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The programs of benchmarks/, imported as they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    found = {name: importlib.import_module(name) for name in ("results", *PROGRAMS)}
    yield found
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_a_floor_is_met_from_its_bound_on(programs: dict[str, ModuleType]) -> None:
    floor = programs["results"].Floor
    assert floor("a", 0.8, 0.8).met and not floor("a", 0.79, 0.8).met
    assert floor("a", 6.0, 6.0, at_most=True).met and not floor("a", 6.1, 6.0, at_most=True).met
    assert "MISSED" in floor("a", 0.5, 0.8, " x").line() and "at least 0.8 x" in floor("a", 0.5, 0.8, " x").line()


def test_ratios_are_of_the_medians_and_against_the_peer_of_the_same_rule(programs: dict[str, ModuleType]) -> None:
    speed = programs["speed"]
    rates = {
        "independent": (500, 100, 600),
        "async shm": (400, 410, 50),
        "sync shm": (350, 350, 350),
        "ddp gloo": (200, 200, 200),
        "tensorflow async": (100, 100, 100),
        "tensorflow sync": (70, 70, 70),
    }
    rows = speed.rows_of({name: [speed.Sample(rate, 4.0) for rate in seen] for name, seen in rates.items()})
    by_name = {row["name"]: row for row in rows}
    assert by_name["async shm"]["of_independent"] == 0.8
    assert by_name["async shm"]["times_tensorflow"] == 4.0
    assert by_name["sync shm"]["times_tensorflow"] == 5.0
    assert by_name["sync shm"]["times_ddp"] == 1.75
    assert by_name["async shm"]["low"] == 50 and by_name["async shm"]["high"] == 410
    met = {(f.what, f.unit.split()[-1]): f.met for f in speed.floors_of(rows)}
    assert met[("async shm", "independent")] and met[("sync shm", "DDP")] and ("async tcp", "independent") not in met


def test_a_row_without_its_peer_has_no_ratio_and_no_floor(programs: dict[str, ModuleType]) -> None:
    speed = programs["speed"]
    rows = speed.rows_of({"independent": [speed.Sample(500, 4)], "sync shm": [speed.Sample(400, 5)]})
    assert rows[1]["times_ddp"] is None and rows[1]["times_tensorflow"] is None
    assert [f.unit for f in speed.floors_of(rows)] == [" of independent"]


def test_a_result_is_kept_with_machine_versions_and_floors(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    results = programs["results"]
    result = results.Result("speed", "work", [{"name": "a"}], [results.Floor("a", 1.0, 2.0)], ["a note"])
    path = results.keep(result, tmp_path, results.machine())
    body = json.loads(path.read_text())
    assert path.name.endswith(f"-speed-{body['machine']['cores']}-cores.json")
    assert {"date", "command", "machine", "versions", "rows", "floors", "notes"} <= set(body)
    assert body["floors"][0]["met"] is False
    assert results.newest("speed", tmp_path) == body and results.newest("load", tmp_path) is None


def test_a_kept_command_names_no_folder_of_the_machine(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = programs["results"]
    monkeypatch.setattr(
        sys, "argv", ["/a/bench.py", "--tensorflow", "/b/python", f"--output={tmp_path}", "--only", "x"]
    )
    body = json.loads(results.keep(results.Result("load", "", []), tmp_path, results.machine()).read_text())
    assert body["command"] == f"bench.py --tensorflow python --output={tmp_path.name} --only x"


def test_the_pages_have_a_block_for_every_kind_of_result(programs: dict[str, ModuleType]) -> None:
    document = programs["document"]
    blocks = [found[2] for page in document.PAGES for found in document.BLOCK.finditer(page.read_text())]
    assert sorted(blocks) == sorted([*programs["results"].KINDS, "short", "gpu"])


@pytest.mark.parametrize("kind", ["speed", "bandwidth", "load", "scaling", "decisions", "startup", "memory", "gpu"])
def test_the_kept_figures_can_be_written_into_the_page(programs: dict[str, ModuleType], kind: str) -> None:
    document = programs["document"]
    body: dict[str, Any] | None = programs["results"].newest(kind)
    assert body is not None, f"benchmarks/results has no figures of {kind}"
    text = getattr(document, kind)(body)
    assert text.startswith("| ") and body["command"] in text and body["date"][:10] in text
    if kind == "scaling":
        for scene in document.draw(body).values():
            drawn = document.standalone(scene)
            assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"') and "var(--" not in drawn


def test_the_cost_of_a_decision_does_not_need_a_cluster(programs: dict[str, ModuleType]) -> None:
    result = programs["decisions"].measure(1, workers=(2, 20), gradients=40)
    assert [row["workers"] for row in result.rows] == [2, 20]
    assert all(row["async_us"] > 0 and row["sync_us"] > 0 for row in result.rows)
