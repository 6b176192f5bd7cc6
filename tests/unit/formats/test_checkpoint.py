"""Reading checkpoints: they come back in any cut, damage is found, named and skipped."""

import math
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.formats.checkpoints import Tensors, cut, example, flip, run_child, save
from torchquorum.formats.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Spec,
    list_checkpoints,
    load_manifest,
    newest_good,
    verify,
)
from torchquorum.formats.checkpoint_write import (
    part_name,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run"), 7)


# What was saved comes back.


@pytest.mark.parametrize("num_ps", [1, 5])
def test_what_three_tasks_saved_is_read_in_the_cuts_of_one_and_of_five(saved, num_ps):
    with CheckpointReader(saved) as reader:
        for stored, value in (entry for part in cut(example(7), num_ps) for entry in part):
            came = reader.read(
                stored.kind, stored.variable, stored.state, stored.start, stored.stop, expect=stored.spec
            )
            assert came.dtype == value.dtype and torch.equal(came, value.reshape(-1))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_of_any_tensor_comes_back_bit_for_bit(saved, data):
    (kind, variable, state), tensor = data.draw(st.sampled_from(sorted(example(7).items(), key=lambda item: item[0])))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    with CheckpointReader(saved) as reader:
        assert torch.equal(reader.read(kind, variable, state, start, stop), tensor.reshape(-1)[start:stop])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_ps=st.integers(1, 9))
def test_the_number_of_tasks_that_saved_makes_no_difference(tmp_path, num_ps):
    with CheckpointReader(save(tmp_path, num_ps, example(1), num_ps)) as reader:
        for (kind, variable, state), tensor in example(1).items():
            assert torch.equal(reader.read(kind, variable, state).view(tensor.shape), tensor)


def test_a_range_is_read_straight_into_the_memory_it_is_for(saved):
    memory = torch.zeros(50)
    with CheckpointReader(saved) as reader:
        reader.read("variable", "layer.float32", start=20, stop=60, out=memory[5:45])
    assert torch.equal(memory[5:45], example(7)["variable", "layer.float32", ""].reshape(-1)[20:60])
    assert not memory[:5].any() and not memory[45:].any()


def test_the_manifest_says_what_the_caller_said_infinities_and_huge_numbers_included(tmp_path):
    scalars = {"schedule": {"best": math.inf, "worst": -math.inf, "steps": [1, 2.5, None]}, "lr": 0.1 + 0.2}
    workers = {"/job:worker/task:0": {"epoch": 3, "seed": 2**128, "random": "AAEC"}}
    manifest = load_manifest(save(tmp_path, 3, plan={"rule": "Sync"}, scalars=scalars, workers=workers))
    assert (manifest.step, manifest.num_ps, manifest.plan) == (3, 3, {"rule": "Sync"})
    assert manifest.scalars == scalars and manifest.workers == workers
    assert abs(manifest.created_at - time.time()) < 60 and manifest.torchquorum


def test_a_nan_in_the_manifest_is_still_one_when_it_is_read(tmp_path):
    assert math.isnan(load_manifest(save(tmp_path, 3, scalars={"loss": [math.nan]})).scalars["loss"][0])


def test_variables_states_and_averages_are_listed(saved):
    with CheckpointReader(saved) as reader:
        assert reader.variables()["layer.bfloat16"] == Spec((7, 11), "bfloat16")
        assert reader.variables()["count"] == Spec((), "int64")
        assert reader.states("layer.float32") == {"exp_avg": Spec((7, 11), "float32"), "step": Spec((), "float32")}
        assert reader.states("count") == {}
        assert "count" not in reader.averages() and "layer.float16" in reader.averages()


def test_the_state_dict_holds_averages_only_where_asked_and_kept(saved):
    with CheckpointReader(saved) as reader:
        plain, averaged = reader.state_dict(), reader.state_dict(averages=True)
    tensors = example(7)
    assert plain.keys() == averaged.keys() == {name for kind, name, _ in tensors if kind == "variable"}
    assert torch.equal(plain["layer.float64"], tensors["variable", "layer.float64", ""])
    assert torch.equal(averaged["layer.float64"], tensors["average", "layer.float64", ""])
    assert torch.equal(averaged["count"], tensors["variable", "count", ""]) and plain["empty"].shape == (0, 3)


def test_averages_that_were_never_kept_are_not_made_up(tmp_path):
    tensors: Tensors = {("variable", "w", ""): torch.ones(3)}
    with (
        CheckpointReader(save(tmp_path, 1, tensors)) as reader,
        pytest.raises(CheckpointError, match="no moving averages"),
    ):
        reader.state_dict(averages=True)


def test_what_is_not_there_or_not_alike_is_refused_with_its_name(saved):
    with CheckpointReader(saved) as reader:
        with pytest.raises(CheckpointError, match="holds no variable layer.other"):
            reader.read("variable", "layer.other")
        with pytest.raises(CheckpointError, match="holds no optimizer state nu of layer.float32"):
            reader.read("optimizer", "layer.float32", "nu")
        with pytest.raises(CheckpointError, match=r"has 77 elements .* \[70, 78\)"):
            reader.read("variable", "layer.float32", start=70, stop=78)
        with pytest.raises(CheckpointError, match=r"float32 \[7, 11\] .* and float32 \[11, 7\] here"):
            reader.read("variable", "layer.float32", expect=Spec((11, 7), "float32"))


def test_scalars_that_are_one_tensor_and_tensors_that_are_not_contiguous_are_stored_by_value(tmp_path):
    step, matrix = torch.tensor(4.0), torch.arange(12.0).view(3, 4)
    tensors: Tensors = {
        ("variable", "a", ""): matrix.t(),
        ("variable", "b", ""): torch.ones(2),
        ("optimizer", "a", "step"): step,
        ("optimizer", "b", "step"): step,
    }
    with CheckpointReader(save(tmp_path, 1, tensors, num_ps=1)) as reader:
        assert torch.equal(reader.state_dict()["a"], matrix.t())
        assert [reader.read("optimizer", name, "step").item() for name in "ab"] == [4.0, 4.0]


def test_others_may_read_a_checkpoint_as_they_may_read_its_folder(tmp_path):
    path = save(tmp_path, 1)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}


# Damage is found, named and skipped.


DAMAGES = {
    "byte in a tensor": (lambda p: flip(p / part_name(1, 3), -3), "part-00001-of-00003.safetensors is damaged"),
    "byte in a header": (lambda p: flip(p / part_name(2, 3), 9), "part-00002-of-00003.safetensors is damaged"),
    "truncated": (lambda p: os.truncate(p / part_name(0, 3), 100), "part-00000-of-00003.safetensors has 100 bytes"),
    "missing file": (lambda p: (p / part_name(1, 3)).unlink(), "part-00001-of-00003.safetensors is missing"),
    "a pipe": (lambda p: [(p / part_name(1, 3)).unlink(), os.mkfifo(p / part_name(1, 3))], "has 0 bytes"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda p: os.truncate(p / "manifest.json", 300), "manifest.json is damaged"),
    "no JSON": (lambda p: (p / "manifest.json").write_bytes(b"\xff\0" * 50), "manifest.json is damaged"),
    "deep JSON": (lambda p: (p / "manifest.json").write_text('{"format":1,"plan":' + "[" * 99999), "is damaged"),
    "a folder": (lambda p: [(p / "manifest.json").unlink(), (p / "manifest.json").mkdir()], "manifest.json is damaged"),
    "empty folder": (lambda p: [shutil.rmtree(p), p.mkdir()], "manifest.json is missing"),
    "no folder": (lambda p: [shutil.rmtree(p), p.write_text("x")], "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_named_and_skipped_for_the_one_before(tmp_path, damage):
    act, message = DAMAGES[damage]
    save(tmp_path, 5)
    act(save(tmp_path, 6))
    found, skipped = newest_good(tmp_path)
    assert found and found[1].step == 5
    assert [info.step for info in skipped] == [6] and message in (skipped[0].problem or "")
    assert message in (verify(tmp_path / "model.ckpt-6") or "")
    if not damage.startswith("byte"):
        assert message in (list_checkpoints(tmp_path)[1].problem or "")


def test_a_reader_names_the_file_that_is_not_what_the_manifest_says(tmp_path):
    path = save(tmp_path, 5)
    manifest = load_manifest(path)
    pieces = manifest.pieces
    manifest.pieces = [msgspec.structs.replace(piece, dtype="int32") for piece in pieces]
    with (
        CheckpointReader(path, manifest) as reader,
        pytest.raises(CheckpointError, match="part-00000-of-00003.* is damaged"),
    ):
        reader.read("variable", "layer.float32")
    manifest.pieces = pieces[:1]
    with (
        CheckpointReader(path, manifest) as reader,
        pytest.raises(CheckpointError, match="element 25 of 77 is missing"),
    ):
        reader.read("variable", "layer.float64", start=20)


# Memory.

MEMORY = """
    from torchquorum.formats.checkpoint import CheckpointReader
    from torchquorum.formats.checkpoint_write import begin, write_part

    def peak_mb():
        return next(int(l.split()[1]) // 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

    folder = Path(sys.argv[1])
    w = torch.ones(64 << 20)
    write_part(begin(folder, 0), 0, 1, {"small": w[:1000]})
    before = peak_mb()
    path = save(folder, 1, {("variable", "w", ""): w}, num_ps=2)
    saved = peak_mb()
    Path("/proc/self/clear_refs").write_text("5")
    del w
    Path("/proc/self/clear_refs").write_text("5")
    empty = peak_mb()
    with CheckpointReader(path) as reader:
        reader.read("variable", "w", start=40_000_000, stop=40_001_000)
        print(saved - before, peak_mb() - empty)
"""


def test_neither_saving_nor_reading_a_range_holds_a_second_copy(tmp_path):
    saving, reading = map(int, run_child(MEMORY, tmp_path).split())
    assert saving < 40 and reading < 40, f"256 MiB: saving took {saving} MiB more, reading 1000 elements {reading}"


def test_tied_names_and_buffers_are_in_the_state_dict_and_tied_names_without_sense_are_not(tmp_path):
    tensors: Tensors = {("variable", name, ""): torch.arange(6.0).view(2, 3) for name in ("w", "mean")}
    path = save(tmp_path, 1, tensors, plan={"tied": {"head": "w", "w": "w", "lost": "gone", "odd": 5}})
    manifest = load_manifest(path)
    buffers = [msgspec.structs.replace(p, kind="buffer") for p in manifest.pieces if p.variable == "mean"]
    manifest.pieces, manifest.buffers = [p for p in manifest.pieces if p.variable == "w"], buffers
    with CheckpointReader(path, manifest) as reader:
        found = reader.state_dict()
    assert found.keys() == {"w", "head", "mean"}
    assert torch.equal(found["head"], found["w"]) and found["head"].data_ptr() != found["w"].data_ptr()
    assert torch.equal(found["mean"], torch.arange(6.0).view(2, 3))
    with CheckpointReader(save(tmp_path, 2, tensors, plan={"tied": "nonsense"})) as reader:
        assert reader.state_dict().keys() == {"w", "mean"}


def test_a_hole_between_two_pieces_is_named_by_its_first_element(tmp_path):
    path = save(tmp_path, 5)
    manifest = load_manifest(path)
    manifest.pieces = [p for p in manifest.pieces if p.kind == "variable" and p.variable == "layer.float32"]
    del manifest.pieces[1]
    with CheckpointReader(path, manifest) as reader:
        with pytest.raises(CheckpointError, match="element 25 of 77 is missing"):
            reader.read("variable", "layer.float32")
        assert reader.read("variable", "layer.float32", stop=25).numel() == 25


def test_a_part_that_is_gone_when_it_is_read_is_named(tmp_path):
    path = save(tmp_path, 5)
    with CheckpointReader(path) as reader:
        (path / part_name(1, 3)).write_bytes(b"no tensors")
        with pytest.raises(CheckpointError, match="part-00001-of-00003.* is damaged: .* cannot be read"):
            reader.read("variable", "layer.float32")
    manifest = load_manifest(save(tmp_path, 6))
    (tmp_path / "model.ckpt-6" / part_name(0, 3)).unlink()
    with (
        CheckpointReader(tmp_path / "model.ckpt-6", manifest) as reader,
        pytest.raises(CheckpointError, match="part-00000-of-00003.* is damaged: .* cannot be read"),
    ):
        reader.read("variable", "layer.float32")
