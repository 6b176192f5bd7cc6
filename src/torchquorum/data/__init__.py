"""Training data: MNIST from the package or a folder, TFRecord files, and each worker's share as mini-batches.

The TYPE_CHECKING block is the list of `tq.data`. Called by jobs, examples and users' programs. Nothing here knows about tasks or
the network: a worker's share follows from two numbers, its index and the number of workers.
"""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.data.coordinator import Prefetcher as Prefetcher
    from torchquorum.data.features import FixedLenFeature as FixedLenFeature
    from torchquorum.data.features import RawFeature as RawFeature
    from torchquorum.data.features import VarLenFeature as VarLenFeature
    from torchquorum.data.features import decode_raw as decode_raw
    from torchquorum.data.mnist import Mnist as Mnist
    from torchquorum.data.mnist import Split as Split
    from torchquorum.data.mnist import load_mnist as load_mnist
    from torchquorum.data.parsing import parse_example as parse_example
    from torchquorum.data.parsing import parse_single_example as parse_single_example
    from torchquorum.data.sampler import Sampler as Sampler
    from torchquorum.data.tfrecords import TFRecordDataset as TFRecordDataset
    from torchquorum.formats.example import Example as Example
    from torchquorum.formats.example import Feature as Feature
    from torchquorum.formats.tfrecord import RecordError as RecordError
    from torchquorum.formats.tfrecord import read_records as read_records
    from torchquorum.formats.tfrecord_write import TFRecordWriter as TFRecordWriter
else:
    __getattr__, __dir__ = load_when_used(__name__)
