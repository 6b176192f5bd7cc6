import pytest

from torchquorum.cluster import TaskId
from torchquorum.devices.names import DeviceName
from torchquorum.errors import DeviceError


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("/job:worker/task:1/device:CUDA:0", "/job:worker/task:1/device:CUDA:0"),
        ("/job:worker/replica:0/task:1/gpu:0", "/job:worker/task:1/device:CUDA:0"),
        ("/job:ps/task:2/cpu:0", "/job:ps/task:2/device:CPU:0"),
        ("job:worker/task:1", "/job:worker/task:1"),
        ("/gpu:1", "/device:CUDA:1"),
        ("/GPU:1", "/device:CUDA:1"),
        ("/cpu:0", "/device:CPU:0"),
        ("/device:GPU:0", "/device:CUDA:0"),
        ("/device:cpu:*", "/device:CPU:0"),
        ("cuda:1", "/device:CUDA:1"),
        ("Cuda", "/device:CUDA:0"),
        ("cpu", "/device:CPU:0"),
        ("mps", "/device:MPS:0"),
        ("meta", "/device:META:0"),
        (" '/cpu:0' ", "/device:CPU:0"),
    ],
)
def test_names_of_tensorflow_and_pytorch_have_one_canonical_form(written: str, canonical: str) -> None:
    assert str(DeviceName.parse(written)) == canonical
    assert DeviceName.parse(canonical) == DeviceName.parse(str(DeviceName.parse(canonical)))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("/gup:0", ["'/gup:0'", "cpu, gpu, cuda", "did you mean gpu?"]),
        ("cudaa:1", ["did you mean cuda?"]),
        ("/device:cdua:0", ["no type of device 'cdua'", "did you mean cuda?"]),
        ("/jobs:worker/cpu:0", ["did you mean job?"]),
        ("/job:worker/task:x", ["task:x", "whole number"]),
        ("/job:/cpu:0", ["must name a job"]),
        ("gpu:-1", ["whole number", "gpu:0"]),
        ("gpu:one", ["whole number"]),
        ("/cpu:0/gpu:1", ["twice"]),
        ("/task", ["needs a colon"]),
        ("", ["is empty"]),
        ("/", ["is empty"]),
        ("7", ["'7'", "cuda:1"]),
    ],
)
def test_a_misspelt_name_is_an_error_that_says_what_was_meant(written: str, expected: list[str]) -> None:
    with pytest.raises(DeviceError) as caught:
        DeviceName.parse(written)
    assert all(text in str(caught.value) for text in expected), caught.value


def test_something_else_than_a_text_is_refused() -> None:
    with pytest.raises(DeviceError, match="3: must be a name"):
        DeviceName.parse(3)  # type: ignore[arg-type]


def test_a_type_that_was_registered_with_torch_is_known_when_it_is_given() -> None:
    assert str(DeviceName.parse("sim:0", more_types=("sim",))) == "/device:SIM:0"
    with pytest.raises(DeviceError, match="sim"):
        DeviceName.parse("sim:0")


@pytest.mark.parametrize(
    ("outer", "inner", "merged"),
    [
        ("/job:worker/task:1", "/gpu:0", "/job:worker/task:1/device:CUDA:0"),
        ("/job:worker/task:1/gpu:0", "/cpu:0", "/job:worker/task:1/device:CPU:0"),
        ("/job:worker/task:1/gpu:0", "/task:0", "/job:worker/task:0/device:CUDA:0"),
        ("/gpu:1", "cuda", "/device:CUDA:1"),
        ("/gpu:1", "cpu", "/device:CPU:0"),
        ("/gpu:1", "/job:worker", "/job:worker/device:CUDA:1"),
    ],
)
def test_what_an_inner_name_leaves_open_comes_from_the_outer_one(outer: str, inner: str, merged: str) -> None:
    assert str(DeviceName.parse(inner).inside(DeviceName.parse(outer))) == merged


def test_a_name_belongs_to_the_task_that_it_names_or_to_any() -> None:
    here = TaskId("worker", 1)
    mine = [
        "/gpu:0",
        "/job:worker/task:1",
        "/task:1/cpu:0",
        "/job:worker/cpu:0",
        "/job:localhost/replica:0/task:0/cpu:0",
    ]
    assert all(DeviceName.parse(name).belongs_to(here) for name in mine)
    others = ["/job:worker/task:0", "/job:ps/task:1", "/job:ps/cpu:0"]
    assert not any(DeviceName.parse(name).belongs_to(here) for name in others)
    assert str(DeviceName.parse("cuda").on(here)) == "/job:worker/task:1/device:CUDA:0"
