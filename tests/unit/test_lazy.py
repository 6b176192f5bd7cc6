"""Names load when used, and a name that is not there says where to look."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchquorum as tq
from torchquorum import lazy


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (tq, "ConfigProto", "module 'torchquorum' has no attribute 'ConfigProto': use tq.tensorflow.ConfigProto"),
        (tq, "DeviceError", "module 'torchquorum' has no attribute 'DeviceError': use tq.errors.DeviceError"),
        (tq.hooks, "LogHook", "module 'torchquorum.hooks' has no attribute 'LogHook': use tq.LogHook"),
        (tq.data, "device", "module 'torchquorum.data' has no attribute 'device': use tq.devices.device"),
        (tq, "Sesion", "module 'torchquorum' has no attribute 'Sesion'"),
        (tq, "__wrapped__", "module 'torchquorum' has no attribute '__wrapped__'"),
    ],
)
def test_a_name_that_is_not_there_says_where_it_is(module: ModuleType, name: str, message: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == message
    assert caught.value.name == name and caught.value.obj is module  # from these Python suggests a name of dir()


def test_a_submodule_can_be_imported_from_its_package() -> None:
    from torchquorum.devices import inventory

    assert inventory.__name__ == "torchquorum.devices.inventory"


def test_everything_public_comes_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from torchquorum.data import *", names)
    assert names["load_mnist"] is tq.data.load_mnist and "batches" not in lazy.listed_names("torchquorum.data")
    assert {name for name in names if name != "__builtins__"} == set(lazy.listed_names("torchquorum.data"))


def test_importing_loads_nothing_and_a_name_loads_only_its_module() -> None:
    program = (
        "import sys, torchquorum as tq\n"
        "loaded = lambda: sorted(m for m in sys.modules if m.startswith('torchquorum.'))\n"
        "print(*loaded())\n"
        "tq.Async\n"
        "print(*loaded(), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before.split() == ["torchquorum.lazy", "torchquorum.version"]
    assert "torchquorum.rules" in after and "torchquorum.session" not in after and after.endswith("False")


def test_a_package_without_its_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="bare_package: its source is needed"):
        lazy.listed_names("bare_package")
