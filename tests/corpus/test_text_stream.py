"""Streamed text is the text: no half characters, no part of a stop string, nothing taken back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from conf.schema import DataConfig
from corpus.chat_tokenizer import load_chat_tokenizer
from corpus.text_stream import TextStream
from corpus.tokenizer import train_bpe

TEXTS = ["Hello, world", "naïve café 😀👩‍👩‍👧 ok", "שלום שלום", "漢字かな交じり", "tab\tnew\n\n  two", "x" * 40, "🏳️‍🌈"]
Codec = tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str], int]


def by_bytes() -> Codec:
    tokenizer = load_chat_tokenizer(DataConfig(tokenizer="byte"))
    return lambda text: tokenizer.encode([text])[0].ids, tokenizer.tokenizer.decode, 256


def by_bpe() -> Codec:
    tokenizer = train_bpe(TEXTS * 3, size=300)
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode, 300


def by_pieces() -> Codec:
    """As Llama 1 and Mistral have it: a space is a letter, the first one is dropped, unknown letters are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helo,wrd", "▁w", "▁ok", "lo"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [("▁", "w"), ("l", "o")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode, len(pieces)


CODECS = [by_bytes, by_bpe, by_pieces]


def streamed(
    decode: Callable, ids: Sequence[int], *, context: Sequence[int] = (), stop: Sequence[str] = ()
) -> list[str]:
    stream = TextStream(decode, context=context, stop=stop)
    pieces = [stream.add(token) for token in ids] + [stream.close()]
    assert "".join(pieces) == stream.text
    return pieces


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_the_text(codec, text):
    encode, decode, _ = codec()
    pieces = streamed(decode, encode(text))
    assert "".join(pieces) == decode(encode(text))
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 1 or len(text) < 8


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_keeps_the_space_that_a_decoder_drops_at_the_beginning(codec, text):
    encode, decode, _ = codec()
    ids = encode(text)
    for cut in range(1, len(ids)):
        if not decode(ids[:cut]).endswith("\ufffd"):
            whole, before = decode(ids), decode(ids[:cut])
            assert "".join(streamed(decode, ids[cut:], context=ids[:cut])) == whole[len(before) :]


@pytest.mark.parametrize("codec", [by_bytes, by_bpe])
def test_any_ids_make_the_text_that_decoding_them_at_once_makes(codec):
    _, decode, size = codec()
    chosen = random.Random(4)
    for _ in range(60):
        ids = [chosen.randrange(size) for _ in range(chosen.randrange(1, 40))]
        assert "".join(streamed(decode, ids)) == decode(ids)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("stop", "wanted", "by"),
    [
        (["o, w"], "Hell", "o, w"), (["zz"], "Hello, world", None), (["world!", "wor"], "Hello, ", "wor"),
        (["d"], "Hello, worl", "d"), (["ll", "ell"], "H", "ell"), (["Hello, world"], "", "Hello, world"),
        (["ld and"], "Hello, world", None), (["😀"], "Hello, world", None),
    ],
)  # fmt: skip
def test_a_stop_string_over_several_tokens_ends_the_text_before_it(codec, stop, wanted, by):
    encode, decode, _ = codec()
    stream = TextStream(decode, context=(), stop=stop)
    seen = ""
    for token in encode("Hello, world"):
        seen += stream.add(token)
        assert wanted.startswith(seen), "nothing is taken back"
    assert seen + stream.close() == stream.text == wanted and stream.stopped_by == by


def test_a_character_in_pieces_is_told_when_it_is_whole_and_a_torn_one_at_the_end():
    _, decode, _ = by_bytes()
    stream = TextStream(decode, context=(), stop=())
    assert [stream.add(byte) for byte in "😀".encode()] == ["", "", "", "😀"]
    assert [stream.add(byte) for byte in "é".encode()[:1]] == [""] and stream.close() == "\ufffd"


def test_one_wrong_byte_takes_no_character_before_it_along():
    """Decoded at once the library gives up the whole run of bytes; what was handed on stays."""
    _, decode, _ = by_pieces()
    ids = [1 + byte for byte in "漢".encode() + b"\xff" + "字".encode()] + [257 + 2]
    assert decode(ids) == 7 * "\ufffd" + "e"
    assert "".join(streamed(decode, ids)) == "漢" + 4 * "\ufffd" + "e"


def test_the_end_of_a_stop_string_may_begin_the_next_one():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), context=(), stop=["aab"])
    assert [stream.add(ord(letter)) for letter in "aaab"] == ["", "", "a", ""] and stream.stopped_by == "aab"
