"""The `variant_config` stage: the resolved config of one chain as a YAML file that runs by itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llmppo.files import write_sealed_text


def run(settings: Mapping[str, Any], *, out: Path) -> None:
    """Write `settings["config"]`, keys in the order of the config models."""
    write_sealed_text(out, yaml.safe_dump(settings["config"], sort_keys=False, allow_unicode=True))
