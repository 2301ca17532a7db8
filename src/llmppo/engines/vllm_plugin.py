"""A vLLM plugin: LoRA on CPUs as one matrix product an adapter.

vLLM 0.32.0 copies an adapter's weights once for every token of a batch, and takes those of the last slot for tokens
without an adapter. Here the rows of each adapter are multiplied together, and rows without one get nothing. vLLM
loads it in each of its processes by the entry point `vllm.general_plugins`; it does nothing but in those that
this package starts for a CPU.
"""

import os
from typing import Any

SWITCH = "LLMPPO_CPU_LORA"  # set in the environment of vLLM's processes


def register() -> None:
    """Put the functions below in the place of vLLM's. Called by vLLM."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, torch_ops, punica_cpu):  # each has the names as its own
        for function in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
            setattr(module, function.__name__, function)


def grouped(inputs: Any, weights: Any, slots: Any) -> Any:
    """[B, I] rows times the [O, I] weights of their slots, [B, O]; slot -1 gives zeros. `weights` [S, (1,) O, I]."""
    weights = weights.squeeze(1) if weights.ndim == 4 else weights
    used = slots.unique().tolist()
    if len(used) == 1 and used[0] >= 0:
        return inputs @ weights[used[0]].to(inputs.dtype).T
    outputs = inputs.new_zeros(inputs.shape[0], weights.shape[1])
    for slot in used:
        if slot >= 0:
            rows = slots == slot
            outputs[rows] = inputs[rows] @ weights[slot].to(inputs.dtype).T
    return outputs


def bgmv_shrink(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
    outputs = grouped(inputs.to(output.dtype), weights, slots)
    output[:, : outputs.shape[1]] = scaling * outputs


def bgmv_expand(inputs: Any, weights: Any, output: Any, slots: Any, add_inputs: bool = True) -> None:
    bgmv_expand_slice(inputs, weights, output, slots, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def bgmv_expand_slice(
    inputs: Any, weights: Any, output: Any, slots: Any, start: int, size: int, add_inputs: bool = True
) -> None:
    outputs = grouped(inputs.to(output.dtype), weights, slots)[: output.shape[0], :size]
    part = output[: outputs.shape[0], start : start + size]
    if add_inputs:
        part += outputs
    else:
        part[:] = outputs
