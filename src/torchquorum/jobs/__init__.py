"""The built-in jobs: the models that `torchquorum train` offers and how they are judged.

Called by the command line, examples and tests. What is here is ordinary PyTorch and knows nothing of clusters.
"""

from torchquorum.jobs.models import CNN, MLP, MODELS, Softmax, evaluate, make_model

__all__ = ["CNN", "MLP", "MODELS", "Softmax", "evaluate", "make_model"]
