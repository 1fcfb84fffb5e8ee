"""Files as datasets: read once into an Arrow file under a key that names their content; rows have their origin.

`datasets` has loaders for these formats. Their cache is keyed by modification time, their rows lack their line, and
since 5.0 a column of mixed types becomes JSON strings without a word; so the reading is ours and what comes out is theirs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as compute

from toolkit.cache.arrow import cached_splits, write_tables
from toolkit.config import Refusal
from toolkit.data.sources import readers, squad
from toolkit.data.sources.find_files import COLUMNAR, DataFile
from toolkit.data.sources.readers import Row, first_double, number_columns, read_rows, what_is, with_numbers
from toolkit.data.sources.remote import is_url, open_url
from toolkit.data.sources.stream_state import Place
from toolkit.system.console import first_line, quoted
from toolkit.system.digests import sha256_of
from toolkit.system.progress import with_progress

if TYPE_CHECKING:
    from datasets import Dataset, Features

BATCH_ROWS = 2000  # rows that become Arrow at once
LINES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")  # of which a row is a line, nearly always


def read_files(files: list[DataFile]) -> Dataset:
    """All rows of files of one format, memory-mapped, with their origin.

    Raises:
        Refusal: what can't be read, with file and line.
    """
    digest = hashlib.blake2b(digest_size=12)
    for code in (__file__, readers.__file__, squad.__file__):
        digest.update(Path(code).read_bytes())
    for file in files:
        digest.update(f"{file.shown}\0{file.sample_by}\0{sha256_of(Path(file.path))}\0".encode())

    def build(folder: Path) -> None:
        write = _write_columnar if files[0].ending in COLUMNAR else _write_rows
        write(files, folder / "rows.arrow")

    return cached_splits(f"files-{digest.hexdigest()}", build)["rows"]


def text_rows(files: list[DataFile], place: Place | None = None) -> Iterator[Row]:
    """Rows of text files with their origin; `place`: of `read_rows`, in a single file."""
    for file in files:
        for line, row in read_rows(file.path, file.ending, file.sample_by, place):
            if isinstance(row.get("tools"), list):
                row["tools"] = json.dumps(row["tools"])  # a JSON schema has no fixed types; chat templates take it as text too
            row = {name: _with_arguments_as_text(value) for name, value in row.items()}
            row["origin"] = f"{file.shown}:{line}"
            yield row


def _with_arguments_as_text(value: Any) -> Any:
    """Messages whose calls of tools have their arguments as JSON text, as OpenAI's format does: they have no fixed types."""
    if not isinstance(value, list) or not any(isinstance(message, dict) and message.get("tool_calls") for message in value):
        return value
    return [_with_calls_as_text(message) if isinstance(message, dict) else message for message in value]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call = {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        written.append(call)
    return {**message, "tool_calls": written}


def is_csv(files: list[DataFile]) -> bool:
    return files[0].ending in (".csv", ".tsv")


def without_origin(rows: Iterable[Row]) -> Iterator[Row]:
    return ({name: value for name, value in row.items() if name != "origin"} for row in rows)


# Text: the columns and types are those of all rows together.


def _count_lines(files: list[DataFile]) -> int | None:
    """How many rows files have at most, where a row is a line; None where that can't be seen without parsing them."""
    if not all(Path(file.path).suffix in LINES and file.sample_by == "line" for file in files):
        return None
    count = 0
    for file in files:
        with open(file.path, "rb", buffering=0) as content:
            while piece := content.read(1 << 20):
                count += piece.count(b"\n")
    return count


class _Widened(Exception):
    """A later row has a column, or a type, that the rows already written lack."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema


def _write_rows(files: list[DataFile], target: Path) -> None:
    types = number_columns(without_origin(text_rows(files))) if is_csv(files) else {}
    schema, total = pa.schema([]), _count_lines(files)
    while True:  # from the start again when a later batch widens the columns: rare, and at most once for each widening
        try:
            tables = _tables(files, types, schema)
            first = next(tables)
            write_tables(target, first.schema, with_progress(itertools.chain([first], tables), "Reading", "rows", total, len))
            return
        except _Widened as wider:
            schema = wider.schema


def _tables(files: list[DataFile], types: dict[str, type], schema: pa.Schema) -> Iterator[pa.Table]:
    rows, written = text_rows(files), False
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        if types:
            batch = [with_numbers(row, types) for row in batch]
        values = {name: [row.get(name) for row in batch] for name in dict.fromkeys(itertools.chain.from_iterable(batch))}
        try:
            arrays = {name: pa.array(column) for name, column in values.items()}
            found = pa.schema([(name, array.type) for name, array in arrays.items()])
            wider = pa.unify_schemas([schema, found], promote_options="permissive")
        except (pa.ArrowException, ValueError, OverflowError):
            raise _odd_row(files) from None
        if written and wider != schema:
            raise _Widened(wider)
        schema, written = wider, True
        for field in schema:
            if field.name not in arrays:
                arrays[field.name] = pa.nulls(len(batch), field.type)
            elif arrays[field.name].type != field.type:
                arrays[field.name] = pa.array(values[field.name], field.type)
        yield pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


def odd_rows(files: list[DataFile]) -> Iterator[str]:
    """What is wrong with each row of text files whose columns can't be put together, after the row's origin.

    First the rows whose column holds another kind of value than in most rows; where there are none, those that differ from
    the rows before them inside a value, or hold one that Arrow can't.
    """
    kinds: dict[str, dict[str, list[str]]] = {}  # column -> kind -> origins
    for row in text_rows(files):
        for name, value in row.items():
            if value is not None:
                kinds.setdefault(name, {}).setdefault(what_is(value), []).append(row["origin"])
    mixed = {name: found for name, found in kinds.items() if len(found) > 1}
    for name, found in mixed.items():
        *odd, usual = sorted(found, key=lambda kind: (len(found[kind]), -list(found).index(kind)))
        for kind in odd:
            for origin in found[kind]:
                yield f"{origin}: {quoted(name)} is {kind}, but {usual} in {len(found[usual]):,} rows"
    if mixed:
        return
    schema = pa.schema([])  # the kinds agree, so it is something inside them, or a value that Arrow can't hold
    for row in text_rows(files):
        for name, value in row.items():
            try:
                alone = pa.schema([(name, pa.array([value]).type)])
            except (pa.ArrowException, ValueError, OverflowError) as error:
                lists = value if isinstance(value, list) else []
                nested = [inner for each in lists for inner in (each if isinstance(each, list) else [each])]  # [[0, 3, "PER"]]
                inside = sorted({what_is(each) for each in nested if each is not None})
                if len(inside) > 1:
                    yield f"{row['origin']}: {quoted(name)} is a list of several kinds of values: {', '.join(inside)}"
                    continue
                # Arrow's words for a whole number name a type of C, or Python's own
                reason = "a whole number beyond 64 bits. Write it as a text" if "too large" in str(error) else error
                yield f"{row['origin']}: {quoted(name)} holds a value that can't be stored: {reason}"
                continue
            try:
                schema = pa.unify_schemas([schema, alone], promote_options="permissive")
            except pa.ArrowException as error:
                reason = str(error).split("Unable to merge: ")[-1]  # the innermost of the nested messages
                yield f"{row['origin']}: {quoted(name)} doesn't fit the rows before it: {reason}"


def _odd_row(files: list[DataFile]) -> Refusal:
    """The refusal that names the first row whose column can't be put together with the others'."""
    first, *others = odd_rows(files)
    if "holds a value that can't be stored" in first:
        return Refusal(first)
    alike = sum(other.partition(": ")[2] == first.partition(": ")[2] for other in others)
    more = f" ({alike:,} more {'row is' if alike == 1 else 'rows are'} like this one)" if alike else ""
    inside = ", inside lists and objects too" if "doesn't fit the rows before it" in first else ""
    return Refusal(f"{first}{more}. A column holds one kind of value{inside}.")


# Parquet and Arrow: the files have their columns and types; rows are numbered from 1.


def _write_columnar(files: list[DataFile], target: Path) -> None:
    from pyarrow.parquet import read_metadata

    features = _features(files)
    tables = _columnar_tables(files, features)
    first = next(tables, None)
    if first is None:
        raise Refusal(f"{', '.join(file.path for file in files)}: no rows.")
    total = sum(read_metadata(file.path).num_rows for file in files) if files[0].ending == ".parquet" else None
    write_tables(target, features.arrow_schema, with_progress(itertools.chain([first], tables), "Reading", "rows", total, len))


def _features(files: list[DataFile]) -> Features:
    """Columns of all the files; label names and the like come along in the metadata that `datasets` leaves there."""
    from datasets import Features, Value

    features: dict[str, Any] = {}
    for file in files:
        schema = _open(file)[0]
        if twice := first_double(schema.names):
            raise Refusal(f"{file.path}: the column {quoted(twice)} is there twice. Rename or remove one of them.")
        for field in schema:
            try:
                Features.from_arrow_schema(pa.schema([field]))
            except ValueError:
                raise Refusal(
                    f"{file.path}: the column {quoted(field.name)} has the Arrow type {field.type}, which datasets can't hold. "
                    "Write the file with another type, or without the column."
                ) from None
        try:
            found = Features.from_arrow_schema(schema)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # of what datasets leaves in a schema's metadata
            reason = f"{type(error).__name__}: {error}"
            raise Refusal(f"{file.path}: the metadata of its columns can't be read ({reason}).") from None
        clash = next((name for name in found if name in features and features[name] != found[name]), None)
        if clash:
            raise Refusal(
                f"{file.path}: the column {quoted(clash)} is {found[clash]}, but {features[clash]} in {files[0].path}. "
                "Files that are read together have the same columns and types."
            )
        features |= found
    return Features({**features, "origin": Value("string")})


def _columnar_tables(files: list[DataFile], features: Features, begin: int = 0) -> Iterator[pa.Table]:
    from datasets.table import table_cast

    schema = features.arrow_schema
    for file in files:
        number = begin
        for batch in _batches(file, begin):
            _check_texts(batch, file, number)
            table = pa.Table.from_batches([batch])
            numbers = pa.array(range(number + 1, number + 1 + len(table))).cast(pa.string())
            origin = compute.binary_join_element_wise(file.shown, numbers, ":")
            columns = {name: table[name] if name in table.column_names else pa.nulls(len(table)) for name in schema.names}
            number += len(table)
            if len(table):
                yield table_cast(pa.table({**columns, "origin": origin}), schema)


def _check_texts(batch: pa.RecordBatch, file: DataFile, number: int) -> None:
    """Refuse values that Arrow reads and Python can't, such as texts that are not UTF-8; `number`: of the rows before."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowException as error:
            for row, value in enumerate(column, number + 1):
                try:
                    value.as_py()
                except UnicodeDecodeError:
                    raise Refusal(f"{file.shown}:{row}: {quoted(name)} holds a text that is not UTF-8.") from None
            raise Refusal(f"{file.path} is damaged: the column {quoted(name)}: {first_line(error)}") from None


def columnar_rows(files: list[DataFile], begin: int = 0) -> Iterator[Row]:
    """Rows of columnar files with their origin; `begin`: the first row, of a single file."""
    for table in _columnar_tables(files, _features(files), begin):
        yield from table.to_pylist()


def _batches(file: DataFile, begin: int = 0) -> Iterator[pa.RecordBatch]:
    try:
        _, batches, left = _open(file, begin)
        for batch in batches:
            yield batch.slice(left) if left else batch
            left = max(0, left - len(batch))
    except (pa.ArrowException, OSError) as error:  # Arrow's readers raise the latter for a file that ends too early
        raise Refusal(f"{file.path} is damaged or cut short: {first_line(error)}") from None


def _open(file: DataFile, begin: int = 0) -> tuple[pa.Schema, Iterator[pa.RecordBatch], int]:
    """Schema, record batches up to which row `begin` may be missing, and how many of their rows lie before it.

    A local file is mapped, not read into memory.
    """
    try:
        source = open_url(file.path) if is_url(file.path) else pa.memory_map(file.path)
        if file.ending == ".parquet":
            from pyarrow.parquet import ParquetFile

            parquet = ParquetFile(source, page_checksum_verification=True)  # where it has any, as ours do
            groups = list(range(parquet.num_row_groups))
            while groups and begin >= (rows := parquet.metadata.row_group(groups[0]).num_rows):
                begin -= rows
                groups.pop(0)
            return parquet.schema_arrow, parquet.iter_batches(BATCH_ROWS, row_groups=groups), begin
        is_stream = source.read(6) != b"ARROW1"
        source.seek(0)
        if is_stream:  # as datasets writes it
            stream = pa.ipc.open_stream(source)
            return stream.schema, iter(stream), begin
        feather = pa.ipc.open_file(source)
        return feather.schema, (feather.get_batch(place) for place in range(feather.num_record_batches)), begin
    except (pa.ArrowException, OSError) as error:
        raise Refusal(f"{file.path} can't be read: {first_line(error)}") from None
