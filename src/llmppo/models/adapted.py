"""One frozen base model with LoRA adapters for actor, critic and reference, and a value head.

Rows are right-padded and attention is causal, so a real position never sees padding and no id has a
special meaning. Layers below the lowest adapted one are the same for every role: `lower` runs them
once, and later passes start from its output.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import DynamicCache

from llmppo.config import LoraSection
from llmppo.errors import ConfigError, NonFiniteError
from llmppo.models.head import OutputHead
from llmppo.models.last_layer import LastLayer
from llmppo.models.layers import LayerRunner
from llmppo.models.packing import BY_ROW, row_positions
from llmppo.models.prefix import can_share, for_rows
from llmppo.models.quantized import is_quantized, prepare_quantized
from llmppo.models.routing import AdapterRouter, Route
from llmppo.seeding import derive_seed

ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"

# Fields of PEFT's LoraConfig that the routed forward honours, or that don't change what is computed.
PLAIN_LORA_FIELDS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
    "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "runtime_config",
}  # fmt: skip
# Other initialisations change the base weights, which all adapters share.
PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal")


def lora_config(section: LoraSection, base: Any) -> LoraConfig:
    """PEFT's config for a config section; `top_layers` becomes `layers_to_transform`."""
    targets: str | list[str] = section.target_modules
    layers: list[int] | None = None
    if section.top_layers is not None:
        stack = getattr(base.get_decoder(), "layers", None)
        if stack is None:
            raise ConfigError("lora.top_layers needs a model with a list of decoder layers")
        if section.top_layers > len(stack):
            raise ConfigError(
                f"lora.top_layers: {section.top_layers} exceeds the model's {len(stack)} layers"
            )
        layers = list(range(len(stack) - section.top_layers, len(stack)))
        if targets == "all-linear":
            targets = sorted(
                {
                    name.rsplit(".", 1)[-1]
                    for name, part in stack.named_modules()
                    if isinstance(part, nn.Linear)
                }
            )
    return LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,
        target_modules=targets,
        layers_to_transform=layers,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def require_plain(config: LoraConfig) -> None:
    """Raise ConfigError for a LoRA option that routed passes would leave out."""
    default = LoraConfig()
    for name in sorted(set(config.__dataclass_fields__) - PLAIN_LORA_FIELDS):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"lora: {name}={getattr(config, name)!r} isn't supported; leave it unset")
    if config.init_lora_weights not in PLAIN_INITIALISATIONS:
        raise ConfigError(
            f"lora: init_lora_weights={config.init_lora_weights!r} changes the base weights that all adapters share; "
            f"use one of {', '.join(map(repr, PLAIN_INITIALISATIONS))}"
        )


class _Skip(nn.Module):
    """Stands in for a decoder layer that has run already, or runs later."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class AdaptedModel:
    """Forward passes of all roles over one base model.

    `base` is changed in place: its linear layers become LoRA layers and its weights are frozen.
    """

    def __init__(
        self,
        base: Any,
        config: LoraConfig,
        *,
        critic: Literal["adapter", "head"] = "adapter",
        separate_reference: bool = True,
        seed: int = 0,
    ) -> None:
        if getattr(base, "peft_config", None) is not None:
            raise ConfigError(
                "the base model already carries PEFT adapters; pass the plain model (merge or unload the adapters first)"
            )
        if config.lora_dropout > 0:
            warnings.warn(
                f"lora_dropout={config.lora_dropout} is run as 0: dropout would put noise into the policy ratio",
                stacklevel=3,
            )
            config.lora_dropout = 0.0
        require_plain(config)
        prepare_quantized(base)
        self.base = base
        self.critic = critic
        self.adapters = [ACTOR] + [CRITIC] * (critic == "adapter") + [REFERENCE] * separate_reference
        device = next(base.parameters()).device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "lora"))
            try:
                self.peft = get_peft_model(base, config, adapter_name=ACTOR)
            except ValueError as error:
                raise ConfigError(f"lora: {error}") from None
            for name in self.adapters[1:]:
                self.peft.add_adapter(name, config)
            self.value_head = nn.Linear(
                base.config.get_text_config().hidden_size, 1, device=device, dtype=torch.float32
            )
        if isinstance(base.get_output_embeddings(), LoraLayer):
            raise ConfigError(
                "lora.target_modules includes the output head; only decoder layers can be adapted"
            )
        self.router = AdapterRouter(self.peft)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        for parameter in self.peft.parameters():
            parameter.requires_grad_(False)
        if separate_reference:
            self.router.copy(ACTOR, REFERENCE)
        for name in self.adapters:
            for parameter in self.router.parameters(name):
                parameter.data = parameter.data.float()
                parameter.requires_grad_(name != REFERENCE)
        self.peft.eval()
        self.head = OutputHead(base)
        self.decoder = base.get_decoder()
        self.layers = LayerRunner(self.decoder)
        self.last_layer = LastLayer(self.layers.layers, self.router)
        self.explicit_positions = True
        self.first_adapted = self._first_adapted_layer()
        self.prefixes = can_share(base.config)
        self.reads_apart = bool(self.last_layer.parts)
        self._check_forward()

    @property
    def device(self) -> torch.device:
        return self.value_head.weight.device

    def parameters(self, role: Literal["actor", "critic"]) -> list[nn.Parameter]:
        """Trainable weights of a role; the critic's include the value head."""
        if role == ACTOR:
            return self.router.parameters(ACTOR)
        adapter = self.router.parameters(CRITIC) if CRITIC in self.adapters else []
        return adapter + list(self.value_head.parameters())

    @property
    def reference_route(self) -> str | None:
        """Adapter of the reference policy; None is the bare base."""
        return REFERENCE if REFERENCE in self.adapters else None

    @property
    def critic_route(self) -> str:
        return CRITIC if self.critic == "adapter" else ACTOR

    def _first_adapted_layer(self) -> int:
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            return 0
        if not isinstance(getattr(self.decoder, "norm", None), nn.Module):
            return self._not_in_two_parts() if self._lowest_adapted(layers) else 0
        return self._lowest_adapted(layers)

    def _lowest_adapted(self, layers: nn.ModuleList) -> int:
        adapted = {id(layer) for layer in self.router.layers.values()}
        inside = [n for n, layer in enumerate(layers) if any(id(part) in adapted for part in layer.modules())]
        total = sum(1 for layer in layers for part in layer.modules() if id(part) in adapted)
        return min(inside) if inside and total == len(adapted) else 0

    def _not_in_two_parts(self) -> int:
        warnings.warn(
            f"{type(self.base).__name__}: layers can't be run in two parts; the frozen ones are run for every role",
            stacklevel=5,
        )
        return 0

    @contextmanager
    def _only_layers(self, part: Literal["lower", "upper"]) -> Iterator[None]:
        layers, norm = self.decoder.layers, self.decoder.norm
        kept = list(layers)
        skipped = range(self.first_adapted, len(kept)) if part == "lower" else range(self.first_adapted)
        try:
            for number in skipped:
                layers[number] = _Skip()
            if part == "lower":
                self.decoder.norm = nn.Identity()
            yield
        finally:
            for number in skipped:
                layers[number] = kept[number]
            self.decoder.norm = norm

    def lower(self, token_ids: Tensor, packed: Sequence[int] | None = None) -> Tensor:
        """[B, T] ids to [B, T, H]: the output of the frozen layers below the first adapted one."""
        with torch.no_grad(), self.layers.update_pass(), self._only_layers("lower"):
            return self._decode(packed, input_ids=token_ids)

    def hidden(
        self,
        token_ids: Tensor,
        route: Route,
        lower: Tensor | None = None,
        packed: Sequence[int] | None = None,
        shared: int = 0,
        read: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [B, T, H] of right-padded rows, each through its adapter of `route`.

        The route must be set by the caller too (`router.using`) while a backward pass is to follow.
        `lower` [B, T, H] is the stored output of `lower` for the same rows. `packed` says that `token_ids` [1, T] are
        rows of these lengths, one after the other (see `packing`). All rows begin with the same `shared` tokens: those
        run once for each group of the route, and only the states after them come back, [B, T - shared, H].
        `read` [n] says which of the states of each group that come back will be looked at (row * length + position); the
        others may then be wrong.
        """
        if not self.skips_unread:
            read = None
        name, inputs = ("input_ids", token_ids) if lower is None else ("inputs_embeds", lower)
        with self.layers.update_pass(), nullcontext() if lower is None else self._only_layers("upper"):
            if not shared:
                with self.router.using(route), self.last_layer.at(read):
                    return self._decode(packed, **{name: inputs})
            rows = len(inputs) // len(route)
            cache = DynamicCache(config=self.base.config)
            unread = read if read is None else read.new_zeros(1)  # experts may not take no token at all
            with self.router.using([(adapter, 1) for adapter, _ in route]), self.last_layer.at(unread):
                self._decode(None, cache, **{name: inputs[::rows, :shared]})
            with self.router.using(route), self.last_layer.at(read):
                return self._decode(None, for_rows(cache, rows), **{name: inputs[:, shared:]})

    def _decode(
        self, packed: Sequence[int] | None, cache: DynamicCache | None = None, **inputs: Any
    ) -> Tensor:
        if packed is not None:
            inputs["position_ids"] = row_positions(packed, self.device)
            if self.base.config._attn_implementation == BY_ROW:
                inputs["row_lengths"] = packed
        elif self.explicit_positions:
            rows = next(iter(inputs.values()))
            start = 0 if cache is None else cache.get_seq_length()
            inputs["position_ids"] = torch.arange(start, start + rows.shape[1], device=rows.device)[None, :]
        if cache is not None:
            inputs["past_key_values"] = cache
        return self.decoder(**inputs, use_cache=cache is not None).last_hidden_state

    def shard(self) -> None:
        """Shard the weights of the base's layers over all ranks (FSDP2); adapters stay whole on each.

        Raises ConfigError for a model without a list of layers and for a quantised one.
        """
        if not self.layers.layers or is_quantized(self.base):
            raise ConfigError(
                "several ranks need a model with a list of decoder layers and without quantisation; set ranks: 1"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (torch.distributed.get_world_size(),))
        whole = {weight for name in self.adapters for weight in self.router.parameters(name)}
        for layer in self.layers.layers:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
        self.prefixes = False  # ranks must run the layers equally often, whatever their rows have in common

    @property
    def shares_prefixes(self) -> bool:
        """Whether `hidden` can run what rows share once. Recomputed layers would see the prefix twice."""
        return self.prefixes and self._as_they_are

    @property
    def skips_unread(self) -> bool:
        """Whether `hidden` leaves out what nothing reads. A recomputed layer wouldn't know any more what that is."""
        return self.reads_apart and self._as_they_are

    @property
    def _as_they_are(self) -> bool:
        return not self.layers.recompute and self.layers.compiler is None

    def values(self, hidden: Tensor) -> Tensor:
        """Values [...] in fp32 of final hidden states [..., H]; `critic="head"` passes no gradient to the trunk."""
        states = hidden.detach() if self.critic == "head" else hidden
        return self.value_head(states.float()).squeeze(-1)

    def base_tensors(self) -> dict[str, Tensor]:
        """The base model's own weights, by their names in `base`."""
        return {
            name: tensor
            for name, tensor in self.base.state_dict().items()
            if ".lora_A." not in name and ".lora_B." not in name
        }

    def base_state(self) -> dict[str, Tensor]:
        """The same under the names that they had before the model was adapted."""
        return {name.replace(".base_layer.", "."): tensor for name, tensor in self.base_tensors().items()}

    def packing(self, on: bool) -> None:
        """Let `packed` passes run, where attention keeps packed rows apart.

        Raises ConfigError where it doesn't: recurrent layers, or an attention that makes no mask of positions.
        """
        attention = self.base.config._attn_implementation
        if not on:
            if attention == BY_ROW:
                self.base.set_attn_implementation("sdpa")
            return
        if attention == "sdpa":
            self.base.set_attn_implementation(BY_ROW)
        tokens, route = torch.arange(7, device=self.device)[None] % self.head.vocabulary, ((None, -1),)
        with torch.no_grad():
            apart = [self.hidden(row, route) for row in tokens.split((4, 3), dim=1)]
            together = self.hidden(tokens, route, packed=(4, 3))
        if not self._close(together, torch.cat(apart, dim=1)):
            raise ConfigError(
                f"ppo.use_sequence_packing: {type(self.base).__name__} with {attention} attention doesn't keep packed rows "
                "apart; switch packing off, or load it with another attention if it has one: sdpa, eager, flex_attention, "
                "flash_attention_2"
            )

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """Weights of one adapter by layer name."""
        state = {}
        for layer_name, layer in self.router.layers.items():
            state[f"{layer_name}.lora_A.weight"] = layer.lora_A[name].weight
            state[f"{layer_name}.lora_B.weight"] = layer.lora_B[name].weight
        return state

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Copy weights into an adapter; names and shapes must agree."""
        own = self.adapter_state(name)
        if set(own) != set(state):
            stray = sorted(set(own) ^ set(state))
            raise ConfigError(
                f"adapter `{name}`: the weights don't fit the LoRA config; first difference: {stray[0]}"
            )
        for key, tensor in own.items():
            if not state[key].is_floating_point():
                raise ConfigError(
                    f"adapter `{name}`: {key} holds {state[key].dtype}, not floating-point numbers"
                )
            if tensor.shape != state[key].shape:
                raise ConfigError(
                    f"adapter `{name}`: {key} has shape {list(state[key].shape)}, this model needs {list(tensor.shape)}; it belongs to another base model"
                )
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(state[key])

    def _close(self, found: Tensor, expected: Tensor) -> bool:
        tolerance = 1e-4 if self.base.dtype == torch.float32 else 5e-2
        return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))

    def _check_forward(self) -> None:
        """Compare our two-part forward and head with the model's own logits, once."""
        tokens = torch.arange(5, device=self.device)[None, :] % self.head.vocabulary
        with torch.no_grad(), self.router.using(((None, -1),)):
            expected = self.base(input_ids=tokens, use_cache=False).logits.float()
            if not bool(torch.isfinite(expected).all()):
                raise NonFiniteError(
                    f"the logits of {type(self.base).__name__} are NaN or infinite before anything was trained: its weights are, or "
                    f"overflow in {str(self.base.dtype).removeprefix('torch.')} (base_model)"
                )
            ours = self.head.logits(self.hidden(tokens, ((None, -1),)))
            if not self._close(ours, expected):
                raise ConfigError(
                    f"the output head of {type(self.base).__name__} does something to its logits that isn't known here"
                )
            if self.prefixes:
                parted = self.head.logits(self.hidden(tokens, ((None, -1),), shared=2))
                self.prefixes = self._close(parted, expected[:, 2:])
            read = torch.tensor([1, 3], device=self.device)
            if self.reads_apart:
                some = self.head.logits(self.hidden(tokens, ((None, -1),), read=read)[:, read])
                self.reads_apart = self._close(some, expected[:, read])
            if self.first_adapted:
                split = self.head.logits(self.hidden(tokens, ((None, -1),), self.lower(tokens)))
                if not self._close(split, expected):
                    self.first_adapted = self._not_in_two_parts()
