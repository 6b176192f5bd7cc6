"""The errors a user of torchquorum can meet.

Every layer raises them; the CLI catches `TorchQuorumError` and prints its message without a traceback. What always
holds: a message says what came, what was allowed and what to change. Mistakes of our own are plain asserts.
"""


class TorchQuorumError(Exception):
    """The base of all errors of torchquorum: its message is meant for the user."""


class ClusterError(TorchQuorumError):
    """A cluster, an address or a task of it is not what it has to be."""


class FlagError(TorchQuorumError):
    """A flag is misspelt, incomplete, contradicted or has a value that is not allowed."""


class DeadlineError(TorchQuorumError):
    """A wait whose deadline passed.

    The message says which task, host and port, what was waited for and what to do.
    """


class RefusedError(TorchQuorumError):
    """A ps refused a request."""


class LostPlaceError(RefusedError):
    """A ps does not know this worker, or holds no variables: it was restarted. The worker joins again."""


class LostCreationError(LostPlaceError):
    """A ps was restarted just after the chief had created its variables. The chief creates them again."""


class LostVariablesError(TorchQuorumError):
    """A ps was restarted and there is no checkpoint to restore its variables from."""


class SavedElsewhereError(TorchQuorumError):
    """The run is over and its last step saved, without this task, which had been taken for dead."""


class TaskLostError(TorchQuorumError):
    """A task stopped answering."""


class AddressInUseError(TorchQuorumError):
    """The address a task should listen on is taken."""


class SecretError(TorchQuorumError):
    """The cluster's secret is missing, cannot be read, or is not the one that the other side has."""


class DataError(TorchQuorumError):
    """A data set is missing, incomplete or not in the expected format."""


class ConfigError(TorchQuorumError):
    """A setting has a value that is not allowed, or two settings contradict each other."""


class NonfiniteError(TorchQuorumError):
    """Every gradient of a worker holds NaN or infinity."""


class DeviceError(TorchQuorumError):
    """A device is misspelt or not there, belongs to another task, or cannot run an operation."""


class GraphError(TorchQuorumError):
    """A model cannot be made a graph, or what came as a graph is not one that a compute task runs."""
