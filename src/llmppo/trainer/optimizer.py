"""One AdamW over two parameter groups, with clipping per role and a schedule by learn call."""

from typing import Literal

import torch
from torch import Tensor, nn

from llmppo.config import PPOConfig
from llmppo.errors import ArtefactError
from llmppo.models.adapted import AdaptedModel
from llmppo.ppo.schedules import lr_scale

Role = Literal["actor", "critic"]
ROLES: tuple[Role, Role] = ("actor", "critic")


class RoleOptimizer:
    """AdamW with groups `actor` and `critic`; both hold fp32 weights."""

    def __init__(self, model: AdaptedModel, config: PPOConfig) -> None:
        self.parameters: dict[Role, list[nn.Parameter]] = {role: model.parameters(role) for role in ROLES}
        self.adamw = torch.optim.AdamW(
            [{"params": self.parameters[role], "lr": 0.0, "name": role} for role in ROLES],
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
        )

    def set_learning_rates(self, config: PPOConfig, learn_step: int) -> dict[Role, float]:
        """Learning rates of learn call `learn_step`; the actor's schedule starts after the warm-up."""
        schedule = config.cosine_lr_schedule_config
        rates: dict[Role, float] = {
            "actor": config.lr_actor * lr_scale(learn_step, schedule, config.critic_warmup_steps),
            "critic": config.critic_learning_rate * lr_scale(learn_step, schedule),
        }
        for group in self.adamw.param_groups:
            group["lr"] = rates[group["name"]]
        return rates

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def clip(self, config: PPOConfig) -> dict[Role, tuple[float, float]]:
        """Clip gradients to `max_grad_norm`; returns each role's norm before and after."""
        norms = {role: _norm(self.parameters[role]) for role in ROLES}
        joint = float(torch.stack(list(norms.values())).norm())
        report: dict[Role, tuple[float, float]] = {}
        for role in ROLES:
            norm = joint if config.share_grad_clip else float(norms[role])
            factor = min(config.max_grad_norm / (norm + 1e-6), 1.0)
            for parameter in self.parameters[role]:
                if parameter.grad is not None and factor < 1.0:
                    parameter.grad.mul_(factor)
            report[role] = (float(norms[role]), float(norms[role]) * factor)
        return report

    def step(self) -> None:
        self.adamw.step()

    def state(self, names: dict[int, str]) -> dict[str, Tensor]:
        """AdamW moments and step counts by parameter name (`names` maps id(parameter) to its name)."""
        tensors: dict[str, Tensor] = {}
        for parameter, entries in self.adamw.state.items():
            for key, value in entries.items():
                tensors[f"{names[id(parameter)]}|{key}"] = torch.as_tensor(value)
        return tensors

    def load_state(self, names: dict[int, str], tensors: dict[str, Tensor]) -> None:
        """Restore what `state` gave; parameters without an entry start fresh. Raises ArtefactError for another's."""
        for role in ROLES:
            for parameter in self.parameters[role]:
                prefix = f"{names[id(parameter)]}|"
                found = {
                    key.removeprefix(prefix): value.clone()
                    for key, value in tensors.items()
                    if key.startswith(prefix)
                }
                if found and {key: tuple(value.shape) for key, value in found.items()} != {
                    "step": (),
                    "exp_avg": tuple(parameter.shape),
                    "exp_avg_sq": tuple(parameter.shape),
                }:
                    raise ArtefactError(f"the optimizer state of {prefix[:-1]} doesn't fit its weights")
                # AdamW keeps its step count on the CPU and its moments beside the weights.
                found = {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in found.items()
                }
                if found:
                    self.adamw.state[parameter] = found
                else:
                    self.adamw.state.pop(parameter, None)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    return torch.stack([grad.norm() for grad in grads]).norm().cpu()
