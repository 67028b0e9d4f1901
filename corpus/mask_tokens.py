"""The tokens that masked language modelling needs beside a vocabulary: the mask, what frames a text, what is no text.

A tokenizer of BERT's kind names them ([MASK], [CLS], [SEP]). `byte` and `bpe` have none: their mask is the id after
their last one, so that their own ids, files and fingerprints are those of causal runs; a text ends with the end of
document, and nothing stands before it. Not here: which tokens are masked (`corpus.masking`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from corpus.tokenizer import Tokenizer, load_auto

MASK = "[MASK]"
# What a lone tokenizer.json calls them, which says nothing of their roles: BERT's names, and RoBERTa's.
NAMES = ((MASK, "[CLS]", "[SEP]"), ("<mask>", "<s>", "</s>"))


@dataclass(frozen=True)
class MaskTokens:
    """mask_id; begin: ids before each text; end_id: after it; special: ids that are never masked, nor put for others;
    size: largest id + 1, the mask included.
    """

    mask_id: int
    begin: tuple[int, ...]
    end_id: int
    special: tuple[int, ...]
    size: int

    @property
    def frame(self) -> int:
        """Tokens that frame one text."""
        return len(self.begin) + 1

    @property
    def identity(self) -> list[object]:
        """All that decides samples, for fingerprints."""
        return [self.mask_id, list(self.begin), self.end_id, list(self.special), self.size]

    @cached_property
    def is_special(self) -> np.ndarray:
        """[size] bool, by id."""
        found = np.zeros(self.size, dtype=bool)
        found[list(self.special)] = True
        return found

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Ids of text, int64."""
        return np.flatnonzero(~self.is_special)


def mask_tokens(tokenizer: Tokenizer) -> MaskTokens:
    """Of a loaded data.tokenizer. ValueError where it has no mask token."""
    if tokenizer.name in ("byte", "bpe"):
        return _found(tokenizer, mask_id=tokenizer.size, begin=None, end_id=None, special=())
    path = Path(tokenizer.name)
    alone = path / "tokenizer.json" if path.is_dir() and not (path / "tokenizer_config.json").is_file() else path
    if alone.is_file():
        return _of_file(tokenizer, alone)
    theirs, _ = load_auto(tokenizer.name)
    if theirs.mask_token_id is None:
        raise ValueError(_no_mask(tokenizer.name))
    return _found(
        tokenizer, mask_id=theirs.mask_token_id, begin=theirs.cls_token_id, end_id=theirs.sep_token_id,
        special=theirs.all_special_ids,
    )  # fmt: skip


def _of_file(tokenizer: Tokenizer, path: Path) -> MaskTokens:
    loaded = tokenizers.Tokenizer.from_file(str(path))
    special = [id_ for id_, token in loaded.get_added_tokens_decoder().items() if token.special]
    for mask, begin, end in NAMES:
        mask_id = loaded.token_to_id(mask)
        if mask_id is not None:
            return _found(
                tokenizer, mask_id=mask_id, begin=loaded.token_to_id(begin), end_id=loaded.token_to_id(end),
                special=special,
            )  # fmt: skip
    raise ValueError(_no_mask(tokenizer.name))


def _found(
    tokenizer: Tokenizer, *, mask_id: int, begin: int | None, end_id: int | None, special: Iterable[int]
) -> MaskTokens:
    """begin and end_id come together, or neither counts: then a text ends with the end of document."""
    before, after = ((), tokenizer.eod_id) if begin is None or end_id is None else ((begin,), end_id)
    known = {*special, mask_id, after, tokenizer.eod_id, *before}
    return MaskTokens(mask_id, before, after, tuple(sorted(known)), max(tokenizer.size, mask_id + 1))


def require_mask(tokens: MaskTokens, tokenizer: Tokenizer, *, vocab_size: int, weights: bool = False) -> None:
    """ValueError where the model's embedding has no row for the mask. weights: some are given, which have what they
    have."""
    if tokens.size > vocab_size:
        ways = f"set model.vocab_size={tokens.size}"
        if weights:
            ways = f"these weights have no row for it: set data.tokenizer to one whose mask is below {vocab_size}"
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the {tokens.size} ids of data.tokenizer={tokenizer.name} "
            f"with its mask token, which objective=mlm needs; {ways}"
        )


def _no_mask(name: str) -> str:
    return (
        f"data.tokenizer={name} names no mask token, which objective=mlm needs; set mask_token in its "
        f"tokenizer_config.json, add {json.dumps(MASK)} to its tokenizer.json, or use byte or bpe"
    )
