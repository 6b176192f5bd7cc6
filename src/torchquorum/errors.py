"""The errors that users of torchquorum can see.

Every layer raises them; the CLI catches `TorchQuorumError` and prints its message without a traceback. What always
holds: a message says what was given, what is allowed and what to change. Internal errors are plain asserts.
"""


class TorchQuorumError(Exception):
    """The base of all errors of torchquorum: its message is meant for the user."""


class ClusterError(TorchQuorumError):
    """A cluster, an address or a task is not valid."""


class FlagError(TorchQuorumError):
    """A flag is misspelt or incomplete, contradicts another, or has a value that is not allowed."""


class DeadlineError(TorchQuorumError):
    """The deadline of a wait has passed.

    The message names the task, host and port, what was waited for, and what to do.
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
    """The run is over and its last step is saved; this task had been declared dead."""


class TaskLostError(TorchQuorumError):
    """A task stopped answering."""


class InterruptedRunError(KeyboardInterrupt):
    """Ctrl-C or SIGTERM has ended a session in good order; a program that does not catch it ends with exit code 130."""


class UpdateError(TorchQuorumError):
    """An update could not be made, so the run has ended for all its tasks; `__cause__` is what failed, if it was in this process."""


class AddressInUseError(TorchQuorumError):
    """The address of a task is already in use."""


class SegmentError(TorchQuorumError):
    """A segment of shared memory could not be created or opened."""


class SecretError(TorchQuorumError):
    """The cluster's secret is missing, cannot be read, or differs from the peer's."""


class DataError(TorchQuorumError):
    """A data set is missing, incomplete or not in the expected format."""


class ConfigError(TorchQuorumError):
    """A setting has a value that is not allowed, or two settings contradict each other."""


class NonfiniteError(TorchQuorumError):
    """Every gradient of a worker contains NaN or infinity."""


class NanLossError(TorchQuorumError):
    """The loss, or a gradient, became NaN or infinite."""


class LaunchError(TorchQuorumError):
    """A run that `tq.launch` started has failed."""


class DeviceError(TorchQuorumError):
    """A device is misspelt or missing, belongs to another task, or cannot run an operation."""


class GraphError(TorchQuorumError):
    """A model cannot be exported as a graph, or a graph is not one that a compute task runs."""
