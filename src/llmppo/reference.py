"""`docs/parameters.md`: every parameter of `LLMPPO`, from the config models, and where it differs from the spec."""

import inspect
import json
from typing import Any

from pydantic_core import PydanticUndefined

from llmppo.config import PPOConfig, SamplingConfig

INTRODUCTION = """\
# Parameters of `LLMPPO`

This page is written from the config models (`llmppo schema --parameters`); a test keeps it in step. Every setting
is a keyword of `LLMPPO(...)` and, for the workflow, a key of the experiment file in the section named here.
A value out of range or an unknown name raises `ConfigError`, which says what is accepted.
"""

DIFFERENCES = """\
## Where this differs from the specification, and why

| what | there | here | why |
| --- | --- | --- | --- |
| `turn_value_reduction` | `final_value` | `initial_value` | The value of a turn must not have seen the turn: with a perfect critic the advantage would vanish. `mean` and `final_value` stay for comparison. |
| `advantage_granularity="auto"` | decided from each batch | decided once, from `max_turns` | A batch of short episodes must not switch the algorithm. |
| token axis: reward of a turn | on every token | on the turn's last action token | Otherwise returns grow with length. |
| token axis: recursion | cut at observations | over action tokens, observations skipped | Credit of a later turn must reach earlier ones. |
| discount on the token axis | `gamma` between tokens | `gamma` between turns, `token_gamma` (1) within | `gamma` is about turns. |
| loss normalisation | mean of each micro-batch | units of the whole mini-batch | Gradients must not depend on `micro_batch_size_per_gpu`. |
| indivisible batch sizes | refused | the last mini-batch is smaller | Nothing is gained by refusing. |
| `top_k` | 50 | 0 (off) | A filter needs `sampling_supports` in `learn`; one that is on by default would make every ratio wrong without. |
| `gradient_checkpointing` | True | None: where the estimate says that activations don't fit the device | It costs a pass (docs/memory.md). |
| `fuse_actor_critic_pass=None` | fuses always off CUDA | fuses where the estimate fits the device, CPU or GPU | The same rule everywhere. |
| `use_liger_loss` | True, at token level only | False, at every level | Only the log-probs come from Liger; the losses are ours. Our own tiles cost about the same (docs/memory.md), give entropies, and need no further package. |
| weight decay | 0.01, fixed | `weight_decay`, 0 | It would pull adapters towards the base behind the KL's back. |
| value clip | always `clip_coef` | `vf_clip_coef`, `clip_coef` by default | Returns have a scale of their own. Warm-up steps don't clip values. |
| value head | random | zero | The first advantages are the returns, not noise. |
| LoRA dropout | applied | warned of, run as 0 | Dropout in the ratio is noise in the ratio. |
| `entropy` | mean of -log p of sampled tokens | entropy of the distribution, with `ent_coef` | That is what the word means. |
| padding | found by id | explicit lengths | The padding id may be the end token. |
| log-probs | stored in the model's type | fp32 | Ratios near 1 need the digits. |
| `update_lr` | static, takes the optimizer | a method | The agent owns its one optimizer. |
| `load_checkpoint` | overwrites live settings | does so when `restore_config` or `restore_hyperparameters` is True (False by default) | A changed config must not be undone silently. |
| checkpoint files | pickled attributes | safetensors and JSON with a manifest | Loading runs no code. |
| `get_action(training=False)`, `test` | sampled without vLLM | greedy | That is what the page says. |
| `activation_offload` | `save_on_cpu`: weights that a pass refers to are copied to the host too | activations only | A frozen base would cross the bus in every pass. |
| `torch_compiler` | the whole model | the decoder layers, in the update only | Sampling grows its cache by a token a step, and would compile for each. |
| `hp_config`, `fsdp_config`, `wrap`, `clone`, `moe_lora_recompute`, `lora_tower_target_modules`, `rollout_strip_multimodal_towers` | keywords of the constructor | refused as unknown | There is no evolution, vision model or adapter on experts here, sharding is set by `ranks`, and a keyword that does nothing misleads. |
| learning rates set after construction | ignored | used in the next learn call | So that they can be changed. |
"""


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def parameter_reference() -> str:
    """The whole page as Markdown."""
    from llmppo.trainer.agent import LLMPPO

    lines = [INTRODUCTION, "## The model and the agent", "", "| parameter | default |", "| --- | --- |"]
    settings = {**PPOConfig.model_fields, **SamplingConfig.model_fields}
    for name, parameter in inspect.signature(LLMPPO.__init__).parameters.items():
        if name != "self" and name not in settings:
            lines.append(f"| `{name}` | `{parameter.default!r}` |")
    lines += ["", "Their meaning stands in the docstring of `LLMPPO`.", ""]
    for title, section, model in (
        ("The algorithm", "ppo", PPOConfig),
        ("Sampling", "rollout", SamplingConfig),
    ):
        lines += [
            f"## {title} (section `{section}`)",
            "",
            "| parameter | default | meaning |",
            "| --- | --- | --- |",
        ]
        for name, field in model.model_fields.items():
            meaning = (field.description or "").replace("|", "\\|")
            lines.append(f"| `{name}` | {_default(field)} | {meaning} |")
        lines.append("")
    return "\n".join([*lines, DIFFERENCES])
