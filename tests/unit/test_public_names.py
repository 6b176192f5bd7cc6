"""The public names, stated here so that a change of them is seen in review; how they are loaded is in test_lazy.py."""

import inspect
from importlib import import_module

import pytest

import torchquorum
from torchquorum import lazy

PUBLIC = {
    "torchquorum": """
        Async Batches Bounded Buffered Clamp ClusterSpec EvaluateHook ExponentialDecay ExponentialMovingAverage Hook LaunchError
        Local LogHook MaxNorm NanLossError Optimizer Ray Reader Rule Session StopAtStepHook SummaryHook Sync Task TorchQuorumError Towers
        UnitNorm capture data devices errors graph hooks join launch register_optimizer rows schedule simulate
        tensorflow types Table
    """,
    "torchquorum.data": """
        Example Feature FixedLenFeature Mnist Prefetcher RawFeature RecordError Sampler Split TFRecordDataset TFRecordWriter
        VarLenFeature decode_raw load_mnist parse_example parse_single_example read_records
    """,
    "torchquorum.devices": "device place",
    "torchquorum.graph": "BatchResult Graph GraphClient GraphSession Server connect",
    "torchquorum.hooks": "FinalAccuracyHook HookSession NanGuardHook ProgressHook Ran StepCounterHook TowerLogHook",
    "torchquorum.rows": "Adagrad Constant FTRL LazyAdam Normal Reading RowOptimizer RowwiseAdagrad SGD Uniform Zeros",
    "torchquorum.tensorflow": """
        ConfigProto Coordinator GPUOptions allow_soft_placement constant l2_regularizer log_device_placement
    """,
    "torchquorum.types": """
        CapturedStep Change ChangedRows Follow Network Patience ReadVersion Scenario Share Simulated SlowDown Step TaskId
    """,
    "torchquorum.errors": """
        AddressInUseError ClusterError ConfigError DataError DeadlineError DeviceError FlagError GraphError
        InterruptedRunError LaunchError LostCreationError LostPlaceError LostVariablesError NanLossError NonfiniteError
        RefusedError SavedElsewhereError
        SecretError SegmentError TaskLostError TorchQuorumError UpdateError
    """,
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    found = {name for name in dir(import_module(module)) if not name.startswith("_")}
    assert found == set(PUBLIC[module].split())


def test_the_list_has_every_namespace() -> None:
    assert set(lazy.namespaces()) == PUBLIC.keys()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there_and_no_submodule_hides_it(module: str) -> None:
    for name in PUBLIC[module].split():
        value = getattr(import_module(module), name)
        assert inspect.ismodule(value) == (f"{module}.{name}" in PUBLIC), f"{module}.{name}"


def test_a_name_has_one_address() -> None:
    names = [name for module, listed in PUBLIC.items() if module != "torchquorum.errors" for name in listed.split()]
    assert sorted(names) == sorted(set(names))


def test_the_top_level_stays_small() -> None:
    assert sum(not inspect.ismodule(getattr(torchquorum, name)) for name in PUBLIC["torchquorum"].split()) <= 35
