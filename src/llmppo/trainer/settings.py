"""The keywords of `LLMPPO`: the fields of `PPOConfig` and `SamplingConfig`, validated together."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from llmppo.config import CosineLRScheduleConfig, PPOConfig, SamplingConfig, Section
from llmppo.errors import ConfigError
from llmppo.explain import explain

AnySection = TypeVar("AnySection", bound=Section)

SETTINGS: dict[str, type[Section]] = {
    **dict.fromkeys(PPOConfig.model_fields, PPOConfig),
    **dict.fromkeys(SamplingConfig.model_fields, SamplingConfig),
}


def split_settings(settings: Mapping[str, Any]) -> tuple[PPOConfig, SamplingConfig]:
    """Keywords to the two config sections. Raises ConfigError for an unknown name or a bad value."""
    for name in settings:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            raise ConfigError(
                f"LLMPPO has no setting `{name}`{f'; did you mean `{near[0]}`?' if near else ''}"
            )

    def of(kind: type[Section]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if SETTINGS[name] is kind}

    return section(PPOConfig, of(PPOConfig)), section(SamplingConfig, of(SamplingConfig))


def section(kind: type[AnySection], values: AnySection | Mapping[str, Any], name: str = "") -> AnySection:
    """A config section from keywords, or as it is. Raises ConfigError naming what is wrong with keyword `name`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error, f"LLMPPO {name}".strip()) from None


def with_signature(constructor: Callable[..., None]) -> Callable[..., None]:
    """Show every setting with its default in the constructor's signature (`help`, editors, the docs)."""
    parameters = [
        parameter
        for parameter in inspect.signature(constructor).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for name, section in SETTINGS.items():
        field = section.model_fields[name]
        default = inspect.Parameter.empty if field.default is PydanticUndefined else field.default
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation
            )
        )
    constructor.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return constructor


__all__ = ["SETTINGS", "CosineLRScheduleConfig", "section", "split_settings", "with_signature"]
