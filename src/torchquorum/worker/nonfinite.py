"""Gradients with NaN or infinity, which the rule refuses: they are said, and a worker that has nothing else gives up.

Owned by `tq.Optimizer`, on the training loop's thread. What always holds: a run whose every gradient is refused ends with
an error that names the variables, instead of going on for ever without a step.
"""

from __future__ import annotations

from torchquorum.errors import NonfiniteError
from torchquorum.lines import first_of
from torchquorum.rules.quorum import Reason
from torchquorum.worker.link import Link
from torchquorum.worker.step import Step

MOST_IN_A_ROW = 100


class Nonfinite:
    """Counts how many gradients in a row were refused because they were not finite."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def follow(self, step: Step, link: Link, track: int = 0) -> None:
        """Looks at what became of a gradient of an optimizer, while the model still has it.

        Raises:
            NonfiniteError: A hundred in a row were refused.
        """
        if step.reason != Reason.NOT_FINITE.value:
            if step.accepted:
                self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row not in (1, MOST_IN_A_ROW):
            return
        exchange = link.member.tracks[track].exchange
        where, spoilt = first_of(exchange.nonfinite()) or "a variable", first_of(exchange.nonfinite_variables())
        if self._in_a_row == 1:
            of_all = f"; the run's variables are not finite themselves: {spoilt}" if spoilt else ""
            link.say(f"the gradient of local step {step.local_step} was refused: not finite in {where}{of_all}")
            return
        advice = (
            f"The run's variables hold NaN or infinity themselves, in {spoilt}, which an update before has brought there: go back to a "
            "checkpoint that does not (`torchquorum checkpoints RUN` shows which)"
            if spoilt
            else "Try a smaller learning rate or clip the gradients (torch.nn.utils.clip_grad_norm_), and look at the data"
        )
        raise NonfiniteError(
            f"{link.task}: {MOST_IN_A_ROW} gradients in a row were refused because they hold NaN or infinity, the last one "
            f"in {where}, at global step {step.version}. {advice}; tq.Optimizer(allow_nonfinite=True) applies such gradients all the same."
        )
