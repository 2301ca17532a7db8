"""A base model held in 4 or 8 bits by bitsandbytes.

Only the frozen linear layers of the decoder are quantised: the output head keeps its data type, so log-probs
are exact for the states that reach it, and adapters stay in fp32.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from llmppo.config import QuantizationConfig
from llmppo.errors import ConfigError


def bnb_config(section: QuantizationConfig, dtype: Any) -> Any:
    """transformers' BitsAndBytesConfig; 4-bit layers compute in `dtype`. Raises ConfigError without bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "base_model.quantization needs bitsandbytes; `make memory` installs it, or pip install --no-deps -r requirements-memory.lock"
        )
    from transformers import BitsAndBytesConfig

    if section.bits == 8:
        # The threshold picks outlier columns over all rows of a pass: log-probs would depend on their neighbours.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quant_type,
        bnb_4bit_use_double_quant=section.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def quantization_of(manifest: Mapping[str, Any]) -> Any:
    """transformers' quantisation config of a base model folder by its manifest; None without quantisation."""
    section = manifest.get("quantization")
    if section is None:
        return None
    import torch

    return bnb_config(QuantizationConfig.model_validate(section), getattr(torch, manifest["dtype"]))


def is_quantized(model: Any) -> bool:
    return getattr(model, "quantization_method", None) is not None


def prepare_quantized(model: Any) -> None:
    """Let a quantised model train. Raises ConfigError when its output head is quantised.

    On CPUs with AVX512-BF16 a 4-bit layer repacks its weights in the first pass without gradient, and from
    then on gives no gradient, silently; that is switched off and undone.
    """
    if not is_quantized(model):
        return
    head = model.get_output_embeddings()
    if not head.weight.is_floating_point():
        raise ConfigError(
            "quantization_config: the output head is quantised; leave it out of the layers with llm_int8_skip_modules=['lm_head']"
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            module.state_dict()  # saving unpacks
