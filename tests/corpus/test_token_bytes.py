"""Bytes by token id add up to the bytes of the text, whatever the tokenizer."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from corpus.token_bytes import token_bytes
from corpus.tokenizer import ByteTokenizer, FastTokenizer, train_bpe

TEXTS = [
    "Hello world, 12 times.\n\n  def f(x):\n\treturn x",
    "naïve café — über",
    "日本語のテキスト and 🤖🎉",
    "שלום עולם",
    "a\x00b\r\n",
]


def sentencepiece_like() -> FastTokenizer:
    """Llama 2's kind: metaspace, byte fallback."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {"<unk>": 0, "</s>": 1, **{name: 2 + n for n, name in enumerate(alphabet)}}
    for piece in ("▁", "a", "e", "l", "o", "H", "w", "r", "d", "▁w", "é"):
        vocab[piece] = len(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "w")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return FastTokenizer(tokenizer, name="sp", eod_id=1)


def byte_level() -> FastTokenizer:
    return FastTokenizer(train_bpe(TEXTS, size=320), name="bpe", eod_id=0)


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, sentencepiece_like])
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(make):
    tokenizer = make()
    lengths = token_bytes(tokenizer)
    assert len(lengths) == tokenizer.size and lengths[tokenizer.eod_id] == 0
    for text in TEXTS:
        assert lengths[tokenizer.encode([text])[0]].sum() == len(text.encode()), text


def test_words_that_are_decoded_with_spaces_between_count_them():
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(["a cat", "a dog"], trainers.WordPieceTrainer(special_tokens=["[UNK]", "[EOS]"]))
    ours = FastTokenizer(tokenizer, name="words", eod_id=1)
    ids = ours.encode(["cat a dog"])[0]
    assert token_bytes(ours)[ids].sum() == len(" cat a dog")  # each with the space before it
