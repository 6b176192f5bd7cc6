"""`tq.rows`: the optimizers of a table's rows, and what rows begin with. The block is the list."""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.update.row_optimizers import FTRL as FTRL
    from torchquorum.update.row_optimizers import SGD as SGD
    from torchquorum.update.row_optimizers import Adagrad as Adagrad
    from torchquorum.update.row_optimizers import Constant as Constant
    from torchquorum.update.row_optimizers import LazyAdam as LazyAdam
    from torchquorum.update.row_optimizers import Normal as Normal
    from torchquorum.update.row_optimizers import RowOptimizer as RowOptimizer
    from torchquorum.update.row_optimizers import RowwiseAdagrad as RowwiseAdagrad
    from torchquorum.update.row_optimizers import Uniform as Uniform
    from torchquorum.update.row_optimizers import Zeros as Zeros
    from torchquorum.worker.row_reading import Reading as Reading
else:
    __getattr__, __dir__ = load_when_used(__name__)
