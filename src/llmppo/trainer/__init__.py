"""The trainer: `LLMPPO` holds model, optimizer and counters; the modules beside it do the work."""

from llmppo.trainer.agent import LLMPPO, ActionResult

__all__ = ["LLMPPO", "ActionResult"]
