"""What workers train on: MNIST from the package or a folder, and each worker's share of it as mini-batches.

Called by jobs, examples and users' programs. Nothing here knows about tasks or the network: a worker's share follows
from two numbers, its index and how many workers there are.
"""

from torchquorum.data.batches import Batches
from torchquorum.data.idx import read_idx
from torchquorum.data.mnist import Mnist, Split, load_mnist

__all__ = ["Batches", "Mnist", "Split", "load_mnist", "read_idx"]
