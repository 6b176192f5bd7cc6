"""`tq.hooks`: the hooks beside those of `tq` itself, what a hook may use of its session and gets after a step. The block is the list."""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.session.hooks.evaluation import FinalAccuracyHook as FinalAccuracyHook
    from torchquorum.session.hooks.hook import HookSession as HookSession
    from torchquorum.session.hooks.hook import Ran as Ran
    from torchquorum.session.hooks.standard import NanGuardHook as NanGuardHook
    from torchquorum.session.hooks.standard import ProgressHook as ProgressHook
    from torchquorum.session.hooks.standard import StepCounterHook as StepCounterHook
    from torchquorum.session.hooks.tower_log import TowerLogHook as TowerLogHook
else:
    __getattr__, __dir__ = load_when_used(__name__)
