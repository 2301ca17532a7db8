"""The small methods around an agent's training: its mode, steps, scores, batch sizes and copies of settings."""

import copy
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from llmppo.errors import ConfigError
from llmppo.trainer.optimizer import RoleOptimizer
from llmppo.trainer.settings import SETTINGS
from llmppo.trainer.state import COUNTERS, AgentState

if TYPE_CHECKING:
    from llmppo.trainer.agent import LLMPPO

# What the constructor takes besides settings and models.
INPUT_ARGUMENTS = (
    "pad_token_id", "pad_token", "model_name", "model_config", "seed", "max_turns", "index", "vllm_config",
    "offload_trainer_during_rollout",
)  # fmt: skip


class Bookkeeping(AgentState):
    """Counters and settings of an agent that are not about learning itself."""

    training: bool
    seconds: float
    _block_began: float | None

    # -- training blocks ----------------------------------------------------------------------

    def set_training_mode(self, training: bool) -> None:
        """Whether `get_action` samples or decodes greedily when it isn't told.

        Layers stay in evaluation mode either way: dropout in a log-prob is noise in the ratio.
        """
        self.training = training

    def init_training_step(self, capture_grama: bool = False) -> None:
        """Open a training block: its time counts into `seconds`. An open block is closed first.

        Raises:
            ConfigError: for `capture_grama`; LoRA adapters have no dormant neurons to measure.
        """
        if capture_grama:
            raise ConfigError("capture_grama: there are no GraMa scores for LoRA adapters; leave it False")
        if self._block_began is not None:
            self.finalize_training_step(0)
        self.set_training_mode(True)
        self._block_began = time.perf_counter()

    def finalize_training_step(self, num_steps: int) -> None:
        """Close the training block, in which the agent took `num_steps` turns. Raises ConfigError."""
        if self._block_began is None:
            raise ConfigError("finalize_training_step without init_training_step before it")
        self.steps += num_steps
        self.seconds += time.perf_counter() - self._block_began
        self._block_began = None

    def add_scores(self, scores: Sequence[float]) -> None:
        """Append mean episode returns to `scores`."""
        self.scores.extend(float(score) for score in scores)

    # -- batch sizes and optimizer ------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full optimizer step; the last one may hold fewer episodes."""
        mini = self.config.mini_batch_size or self.config.batch_size
        return math.ceil(mini / (self.config.micro_batch_size_per_gpu or mini))

    def configure_batch_size_per_process(
        self,
        batch_size: int,
        micro_batch_size_per_gpu: int | None,
        mini_batch_size: int | None,
        group_size: int = 1,
    ) -> None:
        """Set episodes a learn call, a pass and an optimizer step, validated together.

        Raises:
            ConfigError: for sizes that don't fit, or for groups, which PPO doesn't have.
        """
        if group_size != 1:
            raise ConfigError(f"group_size={group_size}: PPO compares with a critic, not with a group; use 1")
        self.update_settings(
            batch_size=batch_size,
            micro_batch_size_per_gpu=micro_batch_size_per_gpu,
            mini_batch_size=mini_batch_size,
        )

    def get_lr_names(self) -> list[str]:
        """Settings that hold the peak learning rates of the optimizer's groups."""
        return ["lr_actor", "lr_critic"]

    def reinit_optimizers(self) -> None:
        """Forget the optimizer's moments and step counts; settings stay."""
        self.optimizer = RoleOptimizer(self.model, self.config)

    # -- looking at and copying agents --------------------------------------------------------

    def get_policy(self) -> Any:
        """The PEFT model; its adapter `actor` is the policy."""
        return self.model.peft

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Tensors, and lists of them, on the agent's device."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(self.model.device)
            return [move(part) for part in value] if isinstance(value, list | tuple) else value

        return tuple(move(value) for value in experiences)

    def preprocess_observation(self, observation: Any) -> Any:
        """The observation itself: prompts reach the model as token ids."""
        return observation

    @staticmethod
    def inspect_attributes(
        agent: "LLMPPO", input_args_only: bool = False, exclude: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Settings and plain attributes of an agent, without its model and optimizer.

        Args:
            agent: The agent to look at.
            input_args_only: Only what the constructor takes; without it counters and histories too.
            exclude: Names to leave out.
        """
        names = [*INPUT_ARGUMENTS, *SETTINGS, *(() if input_args_only else (*COUNTERS, "history"))]
        left_out = set(exclude)
        return {name: getattr(agent, name) for name in names if name not in left_out}

    @staticmethod
    def copy_attributes(agent: "LLMPPO", clone: "LLMPPO", exclude: Iterable[str] = ()) -> "LLMPPO":
        """Copy settings, counters and histories of `agent` to `clone`, and return `clone`.

        Raises:
            ConfigError: when the agents differ in what is fixed at construction, such as `critic`.
        """
        values = Bookkeeping.inspect_attributes(agent, exclude=exclude)
        clone.update_settings(**{name: values.pop(name) for name in SETTINGS if name in values})
        for name, value in values.items():
            setattr(clone, name, copy.deepcopy(value))
        return clone
