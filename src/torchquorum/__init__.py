"""torchquorum: a parameter server for PyTorch.

Names are loaded when first used, so that `torchquorum --help` does not pay for importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchquorum.version import __version__ as __version__

if TYPE_CHECKING:
    from torchquorum.cluster import ClusterSpec, TaskId
    from torchquorum.data import Batches, load_mnist
    from torchquorum.data.coordinator import Coordinator, Prefetcher
    from torchquorum.data.features import FixedLenFeature, RawFeature, VarLenFeature, decode_raw
    from torchquorum.data.parsing import parse_example, parse_single_example
    from torchquorum.data.tfrecords import TFRecordDataset
    from torchquorum.errors import DeviceError, TorchQuorumError
    from torchquorum.formats.example import Example, Feature
    from torchquorum.formats.tfrecord import RecordError, read_records
    from torchquorum.formats.tfrecord_write import TFRecordWriter
    from torchquorum.launcher.functions import LaunchError, launch
    from torchquorum.launcher.ray_cluster import Ray
    from torchquorum.rules import Async, Bounded, Buffered, Rule, Sync
    from torchquorum.session.assignments import BatchResult
    from torchquorum.session.config import ConfigProto, GPUOptions
    from torchquorum.session.evaluation import EvaluateHook, FinalAccuracyHook
    from torchquorum.session.graph_server import GraphClient, Server, connect
    from torchquorum.session.graph_session import GraphSession
    from torchquorum.session.hooks import Hook, Ran
    from torchquorum.session.join import Task, join
    from torchquorum.session.ready import (
        LogHook,
        NanGuardHook,
        NanLossError,
        ProgressHook,
        StepCounterHook,
        StopAtStepHook,
    )
    from torchquorum.session.session import Session
    from torchquorum.session.share import Share
    from torchquorum.session.summaries import SummaryHook
    from torchquorum.session.tower_log import TowerLogHook
    from torchquorum.worker.cannot_run import allow_soft_placement
    from torchquorum.worker.capture import CapturedStep, capture
    from torchquorum.worker.client import Step
    from torchquorum.worker.device_scope import device
    from torchquorum.worker.graph_export import Graph
    from torchquorum.worker.optimizer import ExponentialDecay, ExponentialMovingAverage, Optimizer, schedule
    from torchquorum.worker.place import place
    from torchquorum.worker.placement_log import constant, log_device_placement
    from torchquorum.worker.regularizer import l2_regularizer
    from torchquorum.worker.towers import Towers


_HOMES = {
    "Async": "rules",
    "BatchResult": "session.assignments",
    "Batches": "data",
    "Bounded": "rules",
    "Buffered": "rules",
    "ClusterSpec": "cluster",
    "ConfigProto": "session.config",
    "Coordinator": "data.coordinator",
    "DeviceError": "errors",
    "EvaluateHook": "session.evaluation",
    "Example": "formats.example",
    "ExponentialDecay": "worker.optimizer",
    "ExponentialMovingAverage": "worker.optimizer",
    "Feature": "formats.example",
    "FinalAccuracyHook": "session.evaluation",
    "FixedLenFeature": "data.features",
    "GPUOptions": "session.config",
    "Graph": "worker.graph_export",
    "GraphClient": "session.graph_server",
    "GraphSession": "session.graph_session",
    "Hook": "session.hooks",
    "LaunchError": "launcher.functions",
    "LogHook": "session.ready",
    "NanGuardHook": "session.ready",
    "NanLossError": "session.ready",
    "Optimizer": "worker.optimizer",
    "Prefetcher": "data.coordinator",
    "ProgressHook": "session.ready",
    "Ran": "session.hooks",
    "RawFeature": "data.features",
    "Ray": "launcher.ray_cluster",
    "RecordError": "formats.tfrecord",
    "Rule": "rules",
    "Server": "session.graph_server",
    "Session": "session.session",
    "Share": "session.share",
    "Step": "worker.client",
    "StepCounterHook": "session.ready",
    "StopAtStepHook": "session.ready",
    "SummaryHook": "session.summaries",
    "Sync": "rules",
    "TFRecordDataset": "data.tfrecords",
    "TFRecordWriter": "formats.tfrecord_write",
    "Task": "session.join",
    "TaskId": "cluster",
    "TorchQuorumError": "errors",
    "VarLenFeature": "data.features",
    "allow_soft_placement": "worker.cannot_run",
    "CapturedStep": "worker.capture",
    "capture": "worker.capture",
    "constant": "worker.placement_log",
    "decode_raw": "data.features",
    "device": "worker.device_scope",
    "TowerLogHook": "session.tower_log",
    "Towers": "worker.towers",
    "connect": "session.graph_server",
    "join": "session.join",
    "l2_regularizer": "worker.regularizer",
    "launch": "launcher.functions",
    "load_mnist": "data",
    "log_device_placement": "worker.placement_log",
    "parse_example": "data.parsing",
    "parse_single_example": "data.parsing",
    "place": "worker.place",
    "read_records": "formats.tfrecord",
    "schedule": "worker.optimizer",
}

__all__ = [
    "Async",
    "BatchResult",
    "Batches",
    "Bounded",
    "Buffered",
    "CapturedStep",
    "ClusterSpec",
    "ConfigProto",
    "Coordinator",
    "DeviceError",
    "EvaluateHook",
    "Example",
    "ExponentialDecay",
    "ExponentialMovingAverage",
    "Feature",
    "FinalAccuracyHook",
    "FixedLenFeature",
    "GPUOptions",
    "Graph",
    "GraphClient",
    "GraphSession",
    "Hook",
    "LaunchError",
    "LogHook",
    "NanGuardHook",
    "NanLossError",
    "Optimizer",
    "Prefetcher",
    "ProgressHook",
    "Ran",
    "RawFeature",
    "Ray",
    "RecordError",
    "Rule",
    "Server",
    "Session",
    "Share",
    "Step",
    "StepCounterHook",
    "StopAtStepHook",
    "SummaryHook",
    "Sync",
    "TFRecordDataset",
    "TFRecordWriter",
    "Task",
    "TaskId",
    "TorchQuorumError",
    "TowerLogHook",
    "Towers",
    "VarLenFeature",
    "allow_soft_placement",
    "capture",
    "connect",
    "constant",
    "decode_raw",
    "device",
    "join",
    "l2_regularizer",
    "launch",
    "load_mnist",
    "log_device_placement",
    "parse_example",
    "parse_single_example",
    "place",
    "read_records",
    "schedule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torchquorum' has no attribute {name!r}")
    return getattr(import_module(f"torchquorum.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
