"""Documents out of sources: one row at a time, each with the file and line it came from.

JSONL is read line by line here and not by the `datasets` library, which turns the text "2024-01-01" into a date and 5
into a number, and whose error for a broken line names no line. Only the text column is looked at.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, Protocol, cast

import pyarrow
import pyarrow.parquet

from conf.schema import BadLine
from corpus.duplicates import Duplicates
from corpus.hub import hub_rows, saved_rows
from corpus.rows import Columns, Row
from corpus.sources import ResolvedSource, SourceFile

BOM = b"\xef\xbb\xbf"
WIDE = {  # byte-order marks of encodings that are not read, the longer ones first
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class Document(NamedTuple):
    """text: not empty; digest: 64 bits of its content; num_bytes: of its UTF-8."""

    text: str
    digest: int
    num_bytes: int


class HasFileBytes(Protocol):
    file_bytes: int  # size of the files gone through so far


@dataclass
class Tally:
    """What became of every row: rows = documents + empty + absent + bad. Documents that repeat an earlier one stay."""

    rows: int = 0
    documents: int = 0
    empty: int = 0  # text of no characters (or, after encoding, of no tokens)
    absent: int = 0  # null, or no such key in this row
    bad: int = 0  # broken rows, skipped by data.bad_lines=skip
    first_bad: str | None = None  # message of the first of these
    file_bytes: int = 0  # size of the files gone through so far
    duplicates: Duplicates = field(default_factory=Duplicates)

    def as_counts(self) -> dict[str, Any]:
        names = ("rows", "documents", "empty", "absent", "bad", "first_bad")
        counts = {name: getattr(self, name) for name in names}
        return counts | {"duplicates": self.duplicates.number, "duplicates_of_every": self.duplicates.every}


def documents(
    source: ResolvedSource, *, bad_lines: BadLine, tally: Tally, columns: Columns | None = None
) -> Iterator[Document]:
    """The documents of `source` in order, counted in `tally`. ValueError with file and row where a row is broken.

    columns: in place of the source's text_column.
    """
    limit = source.source.max_documents
    for row in rows(source, columns or Columns(((source.source.text_column,),)), tally):
        if limit is not None and tally.documents >= limit:
            return
        tally.rows += 1
        value, problem = row.value, row.problem
        payload = b""
        if problem is None and value is not None and not isinstance(value, str):
            problem = f"the text is {type(value).__name__} {repr(value)[:40]}, not a string"
        if problem is None and isinstance(value, str):
            try:
                payload = value.encode()
            except UnicodeEncodeError as error:
                problem = f"the text holds half a surrogate pair at character {error.start}"
        if problem is not None:
            message = f"{row.where()}: {problem}; mend it or set data.bad_lines=skip"
            if bad_lines is BadLine.fail:
                raise ValueError(message)
            tally.bad += 1
            tally.first_bad = tally.first_bad or message
        elif value is None:
            tally.absent += 1
        elif not payload:
            tally.empty += 1
        else:
            tally.documents += 1
            digest = int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")
            tally.duplicates.add(digest)
            yield Document(cast(str, value), digest, len(payload))


def rows(source: ResolvedSource, columns: Columns, tally: HasFileBytes) -> Iterator[Row]:
    """Every row of `source` in order, broken ones with their problem; counts the bytes of files gone through."""
    if source.kind == "hub":
        yield from hub_rows(source.source, columns)
    elif source.kind == "saved":
        yield from saved_rows(source.source, columns)
    else:
        readers = {"txt": _text_rows, "jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}
        for file in source.files:
            try:
                yield from readers[file.kind](file, columns)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{file.path}: the gzip stream is damaged ({error}); fetch the file again") from None
            except OSError as error:
                raise ValueError(f"{file.path}: cannot be read ({error.strerror or error})") from None
            tally.file_bytes += file.size


def _open(file: SourceFile) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file.path, "rb") if file.compressed else open(file.path, "rb"))


def _undecodable(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at byte {error.start}); convert it to UTF-8"


def _wide(content: bytes) -> str | None:
    for mark, name in WIDE.items():
        if content.startswith(mark):
            return f"is {name} (it begins with the byte-order mark {mark.hex(' ')}); convert it to UTF-8"
    return None


def _text_rows(file: SourceFile, columns: Columns) -> Iterator[Row]:
    """The whole file is one document."""
    with _open(file) as stream:
        content = stream.read().removeprefix(BOM)
    wide = _wide(content)
    if wide is not None:
        yield Row(file.path, None, problem=wide)
        return
    try:
        yield Row(file.path, None, content.decode())
    except UnicodeDecodeError as error:
        yield Row(file.path, content.count(b"\n", 0, error.start) + 1, problem=_undecodable(error))


def _decoded_lines(file: SourceFile) -> Iterator[tuple[int, str | None, str | None]]:
    """(line number, text with its line end or None, problem or None). Lines end with LF, CR LF or CR, nothing else."""
    number = 0
    with _open(file) as stream:
        for piece in stream:
            if number == 0:
                piece = piece.removeprefix(BOM)
                wide = _wide(piece)
                if wide is not None:  # none of its lines can be told apart, so none can be skipped
                    raise ValueError(f"{file.path}: {wide}")
            for line in piece.splitlines(keepends=True) if b"\r" in piece else (piece,):
                number += 1
                try:
                    yield number, line.decode(), None
                except UnicodeDecodeError as error:
                    yield number, None, _undecodable(error)


def _jsonl_rows(file: SourceFile, columns: Columns) -> Iterator[Row]:
    names: list[str] | None = None  # the first row's columns, until a row has the wanted one
    found = False
    for number, line, problem in _decoded_lines(file):
        line = None if line is None else line.removeprefix("\ufeff")  # files joined by `cat` have marks inside
        if line is not None and not line.strip(" \t\r\n"):
            continue
        record, problem = (None, problem) if line is None else _json_object(line)
        if record is None:
            yield Row(file.path, number, problem=problem)
            continue
        if columns.chosen(record):
            found = True
        elif names is None:
            names = list(record)
        yield Row(file.path, number, columns.value(record))
    if names is not None and not found:
        raise ValueError(columns.missing(file.path, names))


def _json_object(line: str) -> tuple[dict[str, Any] | None, str | None]:
    """(object, None) or (None, problem)."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        return None, f"broken JSON ({what} at character {error.pos + 1})"
    except RecursionError:
        return None, "broken JSON (nested too deeply)"
    except ValueError as error:  # a whole number of thousands of digits
        return None, f"broken JSON ({str(error).split(';')[0]})"
    if not isinstance(record, dict):
        return None, f"the line is a JSON {type(record).__name__}, not an object"
    return record, None


def _csv_rows(file: SourceFile, columns: Columns) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default refuses cells above 128 KiB
    problems: dict[int, str | None] = {}

    def lines() -> Iterator[str]:
        for number, line, problem in _decoded_lines(file):
            if line is None:
                problems[number] = problem
            yield "\n" if line is None else line

    reader = csv.reader(lines(), strict=True)
    header: list[str] = []
    while True:
        before = reader.line_num
        try:
            cells = next(reader, None)
            problem = None
        except csv.Error as error:
            cells, problem = [], f"broken CSV ({error})"
        bad = [problems.pop(n) for n in range(before + 1, reader.line_num + 1) if n in problems]
        if bad:
            problem = bad[0]
        if problem is not None:
            yield Row(file.path, reader.line_num, problem=problem)
        elif cells is None:
            return
        elif not header:
            if not columns.chosen(cells):
                raise ValueError(columns.missing(file.path, cells))
            header = cells
        elif not cells:
            continue
        elif len(cells) != len(header):
            yield Row(file.path, reader.line_num, problem=f"{len(cells)} cells under a header of {len(header)}")
        else:
            record = dict(zip(reversed(header), reversed(cells), strict=True))  # of two equal names the first
            yield Row(file.path, reader.line_num, columns.value(record))


def _parquet_rows(file: SourceFile, columns: Columns) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            names = parquet.schema_arrow.names
            chosen = columns.chosen(names)
            if not chosen:
                raise ValueError(columns.missing(file.path, names))
            for column in chosen if columns.of_text else ():
                _require_text_column(file, column, parquet.schema_arrow.field(column).type)
            row = 0
            for record_batch in parquet.iter_batches(batch_size=1024, columns=list(chosen)):
                for cells in zip(*(record_batch.column(column) for column in chosen), strict=True):
                    row += 1
                    try:
                        record = dict(zip(chosen, (scalar.as_py() for scalar in cells), strict=True))
                        yield Row(file.path, row, columns.value(record))
                    except UnicodeDecodeError as error:
                        yield Row(file.path, row, problem=_undecodable(error))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file.path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _require_text_column(file: SourceFile, column: str, kind: pyarrow.DataType) -> None:
    value, types = kind.value_type if pyarrow.types.is_dictionary(kind) else kind, pyarrow.types
    if not any(is_(value) for is_ in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)):
        raise ValueError(f"{file.path}: column {column!r} is {kind}, not string; write it as text")
