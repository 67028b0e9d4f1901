"""Rows of Hugging Face datasets: hub names (hf:NAME[/CONFIG], mapped or streamed) and folders of `save_to_disk`.

The `datasets` library is imported here only, and late: local text does not need it. A hub name is tokenised once and
its cache is not checked against the hub again: delete the cache folder to take up a newer version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from conf.schema import CorpusSource
from corpus.rows import Row, missing_column


def parse_name(path: str) -> tuple[str, str | None]:
    """(name, config) of hf:NAME[/CONFIG]; a hub name is OWNER/NAME, so a config is what follows its second slash."""
    name = path.removeprefix("hf:")
    if os.path.isdir(name):
        return name, None
    parts = name.split("/")
    if not name or len(parts) > 3 or not all(parts):
        raise ValueError(f"data.sources path={path}: write hf:OWNER/NAME or hf:OWNER/NAME/CONFIG")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def hub_rows(source: CorpusSource) -> Iterator[Row]:
    import datasets

    name, config = parse_name(source.path)
    try:
        dataset = datasets.load_dataset(name, config, split=source.split, streaming=source.streaming)
    except Exception as error:  # the library raises many kinds: network, names, splits, builders
        raise ValueError(f"data.sources path={source.path} split={source.split}: {_one_line(error)}") from None
    yield from _dataset_rows(dataset, source)


def saved_rows(source: CorpusSource) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_from_disk(os.path.expanduser(source.path))
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise ValueError(f"data.sources path={source.path}: not a saved dataset ({_one_line(error)})") from None
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise ValueError(f"{source.path}: no split {source.split!r}; it has {', '.join(dataset)}: set split")
        dataset = dataset[source.split]
    yield from _dataset_rows(dataset, source)


def _dataset_rows(dataset: Any, source: CorpusSource) -> Iterator[Row]:
    column = source.text_column
    names = dataset.column_names
    if names is not None:
        if column not in names:
            raise ValueError(missing_column(source.path, column, names))
        dataset = dataset.select_columns([column])
    number = 0
    try:
        for chunk in dataset.iter(batch_size=1000):
            if column not in chunk:
                raise ValueError(missing_column(source.path, column, chunk))
            for value in chunk[column]:
                number += 1
                yield Row(source.path, number, value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source.path}: a text after row {number} is not UTF-8 ({_one_line(error)})") from None
    except ValueError:
        raise
    except Exception as error:  # a generation error while streaming: many kinds
        raise ValueError(f"{source.path}: reading stopped after row {number} ({_one_line(error)})") from None


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
