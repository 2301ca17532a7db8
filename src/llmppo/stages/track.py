"""The `track` stage: mirror one chain to MLflow.

The metrics files are the truth and the tracker a projection of them, so a tracker that raises, is locked or
can't be reached costs a warning and never a run: the marker is written all the same, and says what happened.
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.files import read_sealed_text, write_sealed, write_text
from llmppo.layout import RUN_PAGE, ui_command
from llmppo.secrecy import redact

log = logging.getLogger(__name__)

LOCAL_UI = "http://127.0.0.1:5000"  # where MLflow's UI serves a store that is a file


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
    """Bring the chain's MLflow run up to date; write the marker `out`, and a page with a link to the run beside it.

    `settings`: {tracking, config}, the config being that of the resolved variant. Raises ArtefactError for a
    damaged metrics file or an edited `config.yaml`, and nothing for what the tracker does, unless its store has filled the disk of the results.
    """
    from llmppo.reporting.results import load_chain
    from llmppo.tracking.mirror import Mirror, connect, fills_disk_of

    chain = load_chain(run_dir, variant, seed)
    if (config := run_dir / "config.yaml").is_file():
        read_sealed_text(config)  # it is mirrored as it lies there
    mirror: Mirror | None = None
    try:
        mirror = Mirror(connect(uri), uri, experiment, chain, settings["config"])
        new = mirror.update()
    except Exception as error:  # whatever a tracker and its database drivers raise
        if fills_disk_of(out, uri, error):
            raise
        if mirror is not None:
            with contextlib.suppress(Exception):
                mirror.fail()
        reason = redact(f"{type(error).__name__}: {error}".strip())
        log.warning("tracking failed, training is not affected: %s", reason)
        _write_page(out, variant, seed, reason=reason)
        write_sealed(out, {"ok": False, "error": reason[:2000]})
        return f"warning: tracking {variant}, seed {seed} failed ({reason.splitlines()[0][:200]})"
    served = uri.startswith("http")
    address = f"{redact(uri).rstrip('/') if served else LOCAL_UI}/#{mirror.page}"
    _write_page(out, variant, seed, address=address, ui=None if served else ui_command(uri))
    write_sealed(out, {"ok": True, "run_id": mirror.run_id, "key": mirror.key, "new": new})
    return f"tracked {variant}, seed {seed}: {new} new entries"


def _write_page(
    marker: Path,
    variant: str,
    seed: int,
    *,
    address: str | None = None,
    ui: str | None = None,
    reason: str | None = None,
) -> None:
    """The page beside the marker that the report links to: where the run is, or why there is none."""
    from llmppo.reporting.templating import render

    values = {"variant": variant, "seed": seed, "address": address, "ui": ui, "reason": reason}
    write_text(marker.with_name(RUN_PAGE), render("mlflow.html.j2", **values))
