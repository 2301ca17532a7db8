"""The `track` stage: mirror one chain to MLflow.

The metrics files are the truth and the tracker a projection of them, so a tracker that raises, is locked or
can't be reached costs a warning and never a run: the marker is written all the same, and says what happened.
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.files import write_sealed
from llmppo.reporting.results import load_chain

log = logging.getLogger(__name__)


def run(
    settings: Mapping[str, Any],
    *,
    experiment: str,
    variant: str,
    seed: int,
    run_dir: Path,
    uri: str,
    out: Path,
) -> str:
    """Bring the chain's MLflow run up to date and write the marker `out`.

    `settings`: {tracking, config}, the config being that of the resolved variant. Raises ArtefactError for a
    damaged metrics file, and nothing for what the tracker does.
    """
    from llmppo.tracking.mirror import Mirror, connect

    chain = load_chain(run_dir, variant, seed)
    mirror: Mirror | None = None
    try:
        mirror = Mirror(connect(uri), uri, experiment, chain, settings["config"])
        new = mirror.update()
    except Exception as error:  # whatever a tracker and its database drivers raise
        if mirror is not None:
            with contextlib.suppress(Exception):
                mirror.fail()
        reason = f"{type(error).__name__}: {error}".strip()
        log.warning("tracking failed, training is not affected: %s", reason)
        write_sealed(out, {"ok": False, "error": reason[:2000]})
        return f"warning: tracking {variant}, seed {seed} failed ({reason.splitlines()[0][:200]})"
    write_sealed(out, {"ok": True, "run_id": mirror.run_id, "key": mirror.key, "new": new})
    return f"tracked {variant}, seed {seed}: {new} new entries"
