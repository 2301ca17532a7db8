"""The Arrow schemas of trajectory files, and how tables of them become files.

Lists of one row are of equal length within their axis: T tokens (`TOKEN_LISTS`), K turns (`TURN_LISTS`) or the
segments (`SEGMENT_LISTS`; one, starting at token 0, unless the context was restarted), so `UNNEST` and `explode` give the token and turn tables. Only numbers that a token need not have are nullable,
and `failure`, which is null where the environment did its work.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmppo.errors import ArtefactError
from llmppo.files import atomic_path, canonical_json

SCHEMA_VERSION = 2
METADATA = b"llmppo.metadata"
SEAL = b"llmppo.metadata_sha256"

TOKEN_LISTS: dict[str, pa.DataType] = {
    "token_ids": pa.int32(),
    "action_mask": pa.bool_(),
    "turn_ids": pa.int16(),
    "sampling_logprobs": pa.float32(),
    "sampling_supports": pa.list_(pa.field("element", pa.int32(), nullable=False)),
}
TURN_LISTS: dict[str, pa.DataType] = {
    "turn_starts": pa.int32(),
    "turn_ends": pa.int32(),
    "turn_rewards": pa.float32(),
    "stop_reasons": pa.string(),
    "invalid": pa.bool_(),
    "observations": pa.string(),
    "actions": pa.string(),
}
SEGMENT_LISTS: dict[str, pa.DataType] = {"segment_starts": pa.int32()}
SCALARS: dict[str, pa.DataType] = {
    "episode_id": pa.string(),
    "split": pa.string(),
    "iteration": pa.int32(),
    "episode_index": pa.int32(),
    "seed": pa.int64(),
    "task_id": pa.string(),
    "return": pa.float32(),
    "success": pa.bool_(),
    "terminated": pa.bool_(),
    "truncated": pa.bool_(),
    "num_turns": pa.int32(),
    "num_action_tokens": pa.int32(),
    "info": pa.string(),
    "failure": pa.string(),
}
UPDATE_LISTS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")

NULLABLE_LISTS = ("sampling_logprobs", "sampling_supports", *UPDATE_LISTS)


def _list_of(name: str, kind: pa.DataType) -> pa.Field:
    nullable = name in NULLABLE_LISTS
    return pa.field(name, pa.list_(pa.field("element", kind, nullable=nullable)), nullable=False)


EPISODE_SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name == "failure") for name, kind in SCALARS.items()]
    + [_list_of(name, kind) for name, kind in (TOKEN_LISTS | TURN_LISTS | SEGMENT_LISTS).items()]
)
UPDATE_SCHEMA = pa.schema(
    [pa.field("episode_id", pa.string(), nullable=False)]
    + [_list_of(name, pa.float32()) for name in UPDATE_LISTS]
)


def list_column(values: Any, kind: pa.DataType, lengths: Sequence[int]) -> pa.ListArray:
    """Flat values cut into lists; NaN becomes null, since NaN here means that there is no number."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind, from_pandas=True))


def list_values(column: pa.ChunkedArray, *, as_numpy: bool) -> list[Any]:
    """A list column as one numpy array a row (null as NaN), or as one Python list a row."""
    rows = []
    for chunk in column.chunks:
        flat = chunk.values.to_numpy(zero_copy_only=False) if as_numpy else chunk.values.to_pylist()
        rows += [flat[start:end] for start, end in pairwise(chunk.offsets.to_numpy())]
    return rows


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Raises ArtefactError for a file that is absent, not Parquet, or whose metadata differ from their checksum."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        facts = file.schema_arrow.metadata or {}
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist; run the stage that writes it first") from None
    except (pa.ArrowException, OSError, ValueError) as error:  # a damaged name is no UTF-8
        raise ArtefactError(
            f"{path} is not a readable Parquet file ({error}); delete it and run the same command"
        ) from error
    seal = facts.get(SEAL)
    if seal is not None and seal.decode(errors="replace") != _seal(facts.get(METADATA, b"")):
        raise ArtefactError(f"{path}: its metadata are damaged; delete it and run the same command")
    return file


def _seal(metadata: bytes) -> str:
    return hashlib.sha256(metadata).hexdigest()


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole file, or some columns of it. Raises ArtefactError where it is absent or damaged."""
    try:
        return open_parquet(path).read(columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError, ValueError) as error:  # a damaged name is no UTF-8
        raise ArtefactError(f"{path} is damaged ({error}); delete it and run the same command") from error


def check_table(path: str | Path) -> None:
    """Read all of a file, every page against its checksum. Raises ArtefactError where something is other than written."""
    table = read_table(path)
    kind = (table.schema.metadata or {}).get(b"llmppo.schema", b"").decode(errors="replace")
    schema = {"episodes": EPISODE_SCHEMA, "update": UPDATE_SCHEMA}.get(kind)
    if schema is None or not table.schema.equals(schema, check_metadata=False):
        raise ArtefactError(
            f"{path} has other columns or types than were written; delete it and run the same command"
        )


def write_parquet(
    path: str | Path,
    kind: str,
    schema: pa.Schema,
    columns: Mapping[str, pa.Array],
    metadata: Mapping[str, Any],
) -> None:
    """Write columns atomically; `kind`, the version and `metadata` (as JSON) become file metadata."""
    text = canonical_json(dict(metadata)).encode()
    facts = {
        b"llmppo.schema": kind,
        b"llmppo.schema_version": str(SCHEMA_VERSION),
        METADATA: text,
        SEAL: _seal(text),
    }
    arrays = [columns[field.name].cast(field.type) for field in schema]
    with atomic_path(path) as temporary:
        pq.write_table(
            pa.table(arrays, schema=schema.with_metadata(facts)),
            temporary,
            compression="zstd",
            write_page_checksum=True,
        )
