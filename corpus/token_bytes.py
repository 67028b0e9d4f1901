"""How many bytes of text each token id stands for, so that bits per byte count the bytes of the text that was scored.

Exact where decoding gives back the text that was encoded (bytes, byte-level BPE, SentencePiece with its byte fallback);
where a tokenizer changes the text (lower case, stripped accents) it is the bytes of what decoding gives.
"""

from __future__ import annotations

import json
import re

import numpy as np

from corpus.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer

ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's byte fallback


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [size]; 0 for the end of document and for ids that no text encodes to."""
    if isinstance(tokenizer, ByteTokenizer):
        lengths = np.ones(tokenizer.size, np.int64)
    elif isinstance(tokenizer, FastTokenizer):
        lengths = _of_fast(tokenizer)
    else:
        lengths = _by_decoding(tokenizer, range(tokenizer.size))
    lengths[tokenizer.eod_id] = 0
    return lengths


def _of_fast(tokenizer: FastTokenizer) -> np.ndarray:
    state = json.loads(tokenizer.to_json())
    added = {one["id"]: 0 if one["special"] else len(one["content"].encode()) for one in state["added_tokens"]}
    lengths = np.zeros(tokenizer.size, np.int64)
    names = {index: name for name, index in tokenizer.vocabulary().items() if index not in added}
    if _is_byte_level(state["decoder"]):
        for index, name in names.items():
            lengths[index] = len(name)  # a letter a byte
    else:
        bytewise = [index for index, name in names.items() if ONE_BYTE.fullmatch(name)]
        others = [index for index in names if index not in set(bytewise)]
        lengths[others] = _by_decoding(tokenizer, others)
        lengths[bytewise] = 1
    for index, size in added.items():
        lengths[index] = size
    return lengths


def _is_byte_level(decoder: dict | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _by_decoding(tokenizer: Tokenizer, ids: object) -> np.ndarray:
    """What each id adds behind another one: decoders drop the space of a text's first word."""
    first = int(tokenizer.encode(["a"])[0][-1])
    alone = len(tokenizer.decode([first]).encode())
    return np.array([len(tokenizer.decode([first, index]).encode()) - alone for index in ids], np.int64)  # type: ignore[attr-defined]
