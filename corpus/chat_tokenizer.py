"""Tokenizers as conversations need them: a chat template, special tokens that are read, and places in the text.

A `Tokenizer` (corpus/tokenizer.py) reads text as nothing but text. Here a "<|im_end|>" that a template writes becomes
its token, as in transformers. So this is another object around the same vocabulary. `byte` and a lone tokenizer.json
have no template of their own: data.chat_template gives them one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conf.schema import DataConfig
from corpus.tokenizer import END_OF_DOCUMENT, load_auto, load_file


@dataclass(frozen=True)
class ChatTokenizer:
    """name: as configured; tokenizer: transformers', its chat_template the one that is used (None: there is none);
    bos_id: what the tokenizer itself puts before text, if it does; eos_id: ends a sequence.
    """

    name: str
    tokenizer: Any
    bos_id: int | None
    eos_id: int

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def size(self) -> int:
        """Largest id + 1."""
        return max(self.vocabulary().values()) + 1

    def vocabulary(self) -> dict[str, int]:
        """token -> id, added tokens included."""
        return self.tokenizer.get_vocab()

    @property
    def fingerprint(self) -> str:
        """Of all that decides ids and masks."""
        parts = [self._backend.to_str(), str(self.tokenizer.chat_template), str(self.bos_id), str(self.eos_id)]
        parts.append(str(sorted(self.tokenizer.special_tokens_map.items())))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """ids and offsets of each text; special tokens in it are read, none is added."""
        return self._backend.encode_batch(texts, add_special_tokens=False)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = processors.Sequence([])  # some of them trim offsets, so that spaces lie nowhere
        return backend


def load_chat_tokenizer(data: DataConfig) -> ChatTokenizer:
    """The tokenizer of `data` with its chat template. ValueError where it cannot serve, with what would."""
    name = data.tokenizer
    if name == "bpe":
        raise ValueError(
            "data.tokenizer=bpe trains a new vocabulary, and conversations are for a model that knows one; name "
            "that one's tokenizer: a folder, a tokenizer.json (the one it was trained with is in data.cache_dir), byte"
        )
    tokenizer, eos_id = _loaded(name)
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise ValueError(
            f"data.tokenizer={name} is {type(tokenizer).__name__}, which cannot say where its tokens lie in the text; "
            "use one with a tokenizer.json"
        )
    if data.chat_template is not None:
        tokenizer.chat_template = _read_template(data.chat_template)
    before = tokenizer("", add_special_tokens=True)["input_ids"][:1]
    adds_bos = tokenizer.bos_token_id is not None and before == [tokenizer.bos_token_id]
    return ChatTokenizer(name, tokenizer, tokenizer.bos_token_id if adds_bos else None, eos_id)


def _loaded(name: str) -> tuple[Any, int]:
    """(transformers' tokenizer, id that ends a sequence)."""
    if name == "byte":
        return PreTrainedTokenizerFast(tokenizer_object=_bytes(), eos_token=END_OF_DOCUMENT), 256
    path = Path(name)
    alone = path / "tokenizer.json" if path.is_dir() and not (path / "tokenizer_config.json").is_file() else path
    if alone.is_file():
        end = load_file(alone, name=name).end
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(alone), eos_token=end)
        return tokenizer, tokenizer.eos_token_id
    return load_auto(name)


def _bytes() -> tokenizers.Tokenizer:
    """corpus.tokenizer.ByteTokenizer as the library has it: 256 bytes, then the end of a document."""
    letters = bytes_to_unicode()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read ({error}); name a file of Jinja text") from None
