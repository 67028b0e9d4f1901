"""The texts of given files as one stream of tokens in memory, as training reads them from its token files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from conf.schema import BadLine, CorpusSource
from corpus.readers import Tally, documents
from corpus.rows import Columns
from corpus.sources import resolve
from corpus.token_file import TokenFile, token_dtype
from corpus.tokenizer import Tokenizer


def texts_of(path: str, *, text_column: str, bad_lines: BadLine) -> Iterator[str]:
    """The documents of a file, folder or glob. ValueError where there is none, or a row is broken."""
    source = resolve(CorpusSource(path=path, text_column=text_column), knob="evaluate.files")
    if source.kind == "megatron":
        raise ValueError(f"evaluate.files path={path}: Megatron's token ids are evaluated as data.sources")
    columns = Columns(((text_column,),), knobs="evaluate.text_column")
    for document in documents(source, bad_lines=bad_lines, tally=Tally(), columns=columns):
        yield document.text


def token_stream(texts: Iterator[str], tokenizer: Tokenizer, *, what: str) -> TokenFile:
    """The documents one after another, each closed by the end of document. ValueError where they give no token."""
    dtype, pieces, ends, total = token_dtype(tokenizer.size), [], [], 0
    while some := list(islice(texts, 256)):
        for ids in tokenizer.encode(some):
            if len(ids):
                pieces.append(np.append(ids, tokenizer.eod_id).astype(dtype))
                total += len(ids) + 1
                ends.append(total)
    if not pieces:
        raise ValueError(f"evaluate.files path={what}: holds no text")
    return TokenFile(np.concatenate(pieces), np.array(ends, np.int64))
