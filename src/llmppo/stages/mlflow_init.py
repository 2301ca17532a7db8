"""The `mlflow_init` stage: create the tracker's tables once, before several jobs would race for it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.files import write_sealed
from llmppo.secrecy import redact

log = logging.getLogger(__name__)


def run(settings: Mapping[str, Any], *, uri: str, out: Path) -> str | None:
    """Initialise the store at `uri` and write the marker `out`, also when the tracker fails."""
    from llmppo.tracking.mirror import fills_disk_of, initialise

    try:
        initialise(uri)
    except Exception as error:  # whatever a tracker and its database drivers raise
        if fills_disk_of(out, uri, error):
            raise
        reason = redact(f"{type(error).__name__}: {error}".strip())
        log.warning("the tracker can't be initialised, training is not affected: %s", reason)
        write_sealed(out, {"ok": False, "error": reason[:2000]})
        return f"warning: the tracker can't be initialised ({reason.splitlines()[0][:200]})"
    write_sealed(out, {"ok": True})
    return None
