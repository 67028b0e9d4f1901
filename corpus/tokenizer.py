"""Tokenizers behind one small interface: bytes, a BPE trained on the corpus, or any Hugging Face tokenizer.

`size` is the largest id + 1, added tokens included (`tokenizer.vocab_size` leaves those out). Text is encoded as plain
text: a literal "<|endoftext|>" in a document does not become the end-of-document id. No special tokens are added; the
corpus puts one end-of-document id after each document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
# Where a tokenizer.json names no end of document, the first of these that it holds is taken.
END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
LONGEST_RUN = 1000  # characters of a run of one kind that a BPE is trained on
KINDS = (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)")  # letters, digits, spaces, marks
LONG_RUN = re.compile("|".join(f"({kind}{{{LONGEST_RUN}}}){kind}+" for kind in KINDS))
KIND_OF_BYTE = np.array(
    [2 if b <= 32 else 0 if b >= 128 or chr(b).isalpha() else 1 if chr(b).isdigit() else 3 for b in range(256)],
    np.uint8,
)


class Tokenizer(Protocol):
    """name: as configured; size: largest id + 1; eod_id: end of document; fingerprint: of everything encoding needs."""

    name: str
    size: int
    eod_id: int
    fingerprint: str

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One int64 array of ids a text, no special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is not valid UTF-8 becomes the replacement character."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """token -> id, added tokens included."""
        ...


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ByteTokenizer:
    """ids 0..255 are UTF-8 bytes, 256 ends a document."""

    name, size, eod_id, fingerprint = "byte", 257, 256, _digest("byte-256")

    def vocabulary(self) -> dict[str, int]:
        """Bytes as SentencePiece names them."""
        return {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_DOCUMENT: self.eod_id}

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", errors="replace")


class FastTokenizer:
    """A tokenizer of the `tokenizers` library; encoding leaves the interpreter lock, so threads run in parallel."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, name: str, eod_id: int) -> None:
        self.name, self.eod_id = name, eod_id
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = _digest(f"{tokenizer.to_str()}{eod_id}")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    @property
    def end(self) -> str:
        """The end-of-document token."""
        return str(self._tokenizer.id_to_token(self.eod_id))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """token -> id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """What its tokenizer.json says."""
        return self._tokenizer.to_str()


class SlowTokenizer:
    """A transformers tokenizer without a `tokenizers` backend (pure Python or SentencePiece)."""

    def __init__(self, tokenizer: Any, *, name: str, eod_id: int) -> None:
        self.name, self.eod_id, self._tokenizer = name, eod_id, tokenizer
        vocabulary = tokenizer.get_vocab()
        self.size = max(vocabulary.values()) + 1
        self._vocabulary = vocabulary
        self.fingerprint = _digest(json.dumps([type(tokenizer).__name__, sorted(vocabulary.items()), eod_id]))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [np.array(ids, np.int64) for ids in encoded["input_ids"]]

    def vocabulary(self) -> dict[str, int]:
        """token -> id, added tokens included."""
        return dict(self._vocabulary)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    """`name` as in data.tokenizer, but for "bpe" (see `train_bpe`): byte, a tokenizer.json, a folder or a hub name."""
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_file():
        return load_file(path, name=name)
    if not path.is_dir() and (name.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ValueError(f"data.tokenizer={name}: no such file or folder (from {Path.cwd()})")
    if path.is_dir() and (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        return load_file(path / "tokenizer.json", name=name)
    return _load_transformers(name)


def load_file(path: Path, *, name: str) -> FastTokenizer:
    """A tokenizer.json; its end of document is the first of END_TOKENS it holds."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"data.tokenizer={name}: {path} is not a tokenizer.json ({_one_line(error)})") from None
    for token in END_TOKENS:
        eod_id = tokenizer.token_to_id(token)
        if eod_id is not None:
            return FastTokenizer(tokenizer, name=name, eod_id=eod_id)
    raise ValueError(_no_end(name))


def load_auto(name: str, **special: str) -> tuple[Any, int]:
    """(transformers' tokenizer of a folder or hub name, id that ends a document). special: tokens by what they are for,
    in place of those that its files name."""
    from transformers import AutoTokenizer  # seconds to import; the byte and BPE tokenizers do without

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **special)
    except Exception as error:  # OSError, ValueError, KeyError and others, by the kind of fault
        raise ValueError(
            f"data.tokenizer={name} cannot be loaded ({_one_line(error)}); "
            "use byte, bpe, a tokenizer.json, a folder, or a hub name that this machine can reach"
        ) from None
    eod_id = tokenizer.eos_token_id
    if eod_id is None:
        known = [token for token in END_TOKENS if token in tokenizer.get_vocab()]
        if not known:
            raise ValueError(_no_end(name))
        eod_id = tokenizer.convert_tokens_to_ids(known[0])
    return tokenizer, eod_id


def _load_transformers(name: str) -> Tokenizer:
    tokenizer, eod_id = load_auto(name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return FastTokenizer(backend, name=name, eod_id=eod_id)
    return SlowTokenizer(tokenizer, name=name, eod_id=eod_id)


def train_bpe(texts: Iterable[str], *, size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2's pre-tokenizer) with `size` ids at most; id 0 ends a document. Deterministic."""
    if size < 257:
        raise ValueError(f"data.bpe_vocab_size={size} must be at least 257: 256 bytes and the end of document")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_without_long_runs, texts), trainer)
    return tokenizer


def _without_long_runs(text: str) -> str:
    """The text with at most LONGEST_RUN characters of each run of letters, of digits, of spaces, or of other marks:
    what pre-tokenizers of the GPT kind keep together. Training time grows with the square of a run of one character
    (100,000 spaces took 18 s), and no language has such words."""
    kinds = KIND_OF_BYTE[np.frombuffer(text.encode(), np.uint8)]
    ends = np.flatnonzero(kinds[1:] != kinds[:-1])
    if np.diff(ends, prepend=-1, append=len(kinds) - 1).max() <= LONGEST_RUN:
        return text  # told fast: the pattern alone takes a third of the training's time
    return LONG_RUN.sub(r"\1\2\3\4", text)


def _no_end(name: str) -> str:
    return (
        f"data.tokenizer={name} names no end-of-document token; set eos_token in its tokenizer_config.json "
        f"or add one of {', '.join(END_TOKENS)}"
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
