"""A manifest is checked before it is believed."""

import json

import pytest

from tests.unit.formats.checkpoints import (
    save,
)
from torchquorum.formats.checkpoint import (
    CheckpointError,
    UnreadableError,
    load_manifest,
    newest_good,
)
from torchquorum.formats.checkpoint_write import (
    part_name,
)

# Malice is refused.


def first(manifest: dict) -> dict:
    return manifest["pieces"][0]


def rename(manifest: dict, name: str) -> None:
    manifest["files"][name] = manifest["files"].pop(part_name(0, 1))
    for piece in manifest["pieces"]:
        piece["file"] = name


def as_large(manifest: dict) -> None:
    first(manifest).update(shape=[2**40, 2**22], stop=2**62)


def as_buffer(manifest: dict, **changes: str) -> dict:
    return dict(first(manifest), kind="buffer", **changes)


MALICE = {
    "parent": (lambda m: rename(m, "../model.ckpt-1/part.safetensors"), "only plain names"),
    "dots": (lambda m: rename(m, ".."), "only plain names"),
    "absolute": (lambda m: rename(m, "/etc/passwd"), "only plain names"),
    "separator": (lambda m: rename(m, "a/b.safetensors"), "only plain names"),
    "newline": (lambda m: rename(m, "a.safetensors\n"), "only plain names"),
    "unlisted file": (lambda m: first(m).update(file="/etc/passwd"), "not in the list of files"),
    "overlap": (lambda m: m["pieces"].append(dict(first(m), key="x", start=3)), "where element 77 is next"),
    "hole": (lambda m: first(m).update(start=5), "where element 0 is next"),
    "short": (lambda m: first(m).update(stop=70), "end at element 70 of 77"),
    "backwards": (lambda m: first(m).update(start=70, stop=7), "where element 0 is next"),
    "negative": (lambda m: first(m).update(start=-5), "int` >= 0"),
    "negative shape": (lambda m: first(m).update(shape=[-7, -11]), "int` >= 0"),
    "huge": (as_large, "too small for its tensors"),
    "huge step": (lambda m: m.update(step=10**30), "holds step 1000000"),
    "dtype": (lambda m: first(m).update(dtype="load"), "dtype 'load'"),
    "kind": (lambda m: first(m).update(kind="pickle"), "Invalid enum value"),
    "orphan": (lambda m: first(m).update(kind="average", variable="nobody"), "belongs to no variable"),
    "nameless state": (lambda m: first(m).update(kind="optimizer"), "only an optimizer state"),
    "shared": (lambda m: m["pieces"].append(dict(first(m), variable="twin")), "with another tensor"),
    "two shapes": (lambda m: m["pieces"].append(dict(first(m), key="x", start=77, shape=[77])), "in one slice"),
    "buffer among variables": (lambda m: first(m).update(kind="buffer"), "must hold all buffers and nothing else"),
    "variable among buffers": (
        lambda m: m.update(buffers=[dict(first(m), key="x")]),
        "must hold all buffers and nothing else",
    ),
    "buffer with a variable's name": (lambda m: m.update(buffers=[as_buffer(m)]), "has the name of a variable"),
    "buffer in no file": (
        lambda m: m.update(buffers=[as_buffer(m, variable="b", file="c")]),
        "not in the list of files",
    ),
    "buffer in another's place": (lambda m: m.update(buffers=[as_buffer(m, variable="b")]), "with another tensor"),
    "no checksum": (lambda m: m["files"][part_name(0, 1)].update(sha256=""), "no checksum"),
    "number": (lambda m: m.update(scalars={"x": {"~float": []}}), "is damaged"),
    "wrong type": (lambda m: m.update(pieces={}), "Expected `array`"),
}


@pytest.mark.parametrize("malice", MALICE)
def test_a_hostile_manifest_is_refused(tmp_path, malice):
    act, message = MALICE[malice]
    path = save(tmp_path, 1, num_ps=1)
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"]
    act(content)
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load_manifest(path)
    assert newest_good(tmp_path)[0] is None


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = save(tmp_path, 1, num_ps=1)
    whole = (path / "manifest.json").read_bytes()
    assert load_manifest(path).step == 1
    for at in range(0, len(whole), 7):
        (path / "manifest.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            load_manifest(path)


def test_one_of_a_release_without_checksums_is_read_and_a_name_that_nobody_knows_is_damage(tmp_path):
    path = save(tmp_path, 1, num_ps=1)
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"]
    (path / "manifest.json").write_text(json.dumps(content))
    assert load_manifest(path).step == 1
    content["gorkers"] = content.pop("workers")
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"is damaged: .*unknown field `gorkers`"):
        load_manifest(path)


def test_a_newer_format_may_be_whole_and_is_not_passed_over(tmp_path):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    for read in (lambda: load_manifest(manifest.parent), lambda: newest_good(tmp_path)):
        with pytest.raises(UnreadableError, match=r"has format 2; torchquorum .* reads format 1"):
            read()
