"""The `hf` engine on an adapted model: replies of the actor's adapter, at the policy's sampling settings."""

from typing import Any

from torch import Tensor

from llmppo.config import SamplingConfig
from llmppo.engines.hf import HFEngine, HFStep
from llmppo.envs.templates import end_token_ids
from llmppo.models.adapted import ACTOR, AdaptedModel


class ActorStep(HFStep):
    """One decoding step of the base model with every row going through the actor's adapter."""

    def __init__(self, model: AdaptedModel) -> None:
        super().__init__(model.base)
        self._router = model.router

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        with self._router.using(((ACTOR, -1),)):
            return super().__call__(input_ids, attention_mask, position_ids, cache)


def model_end_tokens(model: Any) -> set[int]:
    """Ids that end a reply as far as the model knows: its generation config's, else its config's."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return set(ids) if isinstance(ids, (list, tuple)) else {int(ids)}
    return set()


def actor_engine(model: AdaptedModel, sampling: SamplingConfig, tokenizer: Any) -> HFEngine:
    """An engine that samples from the actor; replies end where tokenizer and chat template say."""
    return HFEngine.from_config(
        ActorStep(model),
        end_token_ids(tokenizer, model.base.generation_config),
        sampling,
        tokenizer=tokenizer,
        pad_id=tokenizer.pad_token_id or 0,
        device=model.device,
    )
