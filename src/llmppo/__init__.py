"""Turn-level PPO for language models as a reproducible Snakemake workflow.

The names below are loaded when first used, so that importing the package stays cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "LLMPPO": "llmppo.trainer.agent",
    "RolloutHarness": "llmppo.envs.harness",
    "train_llm_rollout": "llmppo.training",
    "save_llm_checkpoint": "llmppo.training",
}

__all__ = ["LLMPPO", "RolloutHarness", "__version__", "save_llm_checkpoint", "train_llm_rollout"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
