"""The artefacts of a tracking store that was moved or copied together with them.

MLflow keeps an absolute location for each experiment and run, and has no call that changes one. So the two columns
are rewritten in the store itself, which is sqlite and lies beside `mlartifacts`.
"""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from llmppo.errors import LlmppoError

COLUMNS = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
LOCATION = re.compile(r"file://.*(/mlartifacts/.+)")


def bring_artefacts_along(database: Path) -> None:
    """Let every location below an `mlartifacts` folder point to the one beside `database`. Raises LlmppoError."""
    root = database.parent.absolute().as_uri()

    def moved(location: str) -> str:
        found = LOCATION.fullmatch(location)
        return f"{root}{found[1]}" if found else location

    try:
        with closing(sqlite3.connect(database)) as store, store:
            store.create_function("moved", 1, moved, deterministic=True)
            for table, column in COLUMNS:
                store.execute(f"UPDATE {table} SET {column} = moved({column}) WHERE {column} IS NOT NULL")
    except sqlite3.Error as error:
        raise LlmppoError(
            f"{database} can't be used as MLflow's store ({error}); delete it and each chain's tracking.json, adopt again, "
            "and `llmppo run` mirrors all of it anew"
        ) from None
