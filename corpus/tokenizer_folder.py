"""A run's tokenizer as files that transformers' AutoTokenizer loads, for a folder of exported weights.

`byte` is written as a byte-level BPE without merges, whose ids are the same. Where masks are learnt, `byte` and `bpe`
get the mask token that they were trained with. Not here: encoding (`corpus.tokenizer`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from conf.schema import DataConfig, Objective
from corpus.mask_tokens import MASK
from corpus.prepare import bpe_file
from corpus.tokenizer import END_OF_DOCUMENT, ByteTokenizer, load_file

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
FILES = (
    TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def write_tokenizer(data: DataConfig, out: Path, *, objective: Objective = Objective.clm) -> dict[str, Any]:
    """Write data.tokenizer into a folder of weights; the token ids of config.json that go with it.

    Raises ValueError where it is not to be found from here.
    """
    name = data.tokenizer
    if name == "byte":
        byte_tokenizer().save(str(out / TOKENIZER))
        ids = _fast(out, END_OF_DOCUMENT, ByteTokenizer.eod_id)
    elif name == "bpe":
        ids = _from_file(bpe_file(data), out, name)
    if name in ("byte", "bpe"):
        if objective is Objective.mlm:
            _add_mask(out)
        return ids
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(path, out, name)
    if path.is_dir():
        if (path / TOKENIZER).is_file() and not (path / SETTINGS).is_file():
            return _from_file(path / TOKENIZER, out, name)
        copied = copy_files(path, out)
        if not copied:
            raise ValueError(f"data.tokenizer={name} holds none of a tokenizer's files")
        return token_ids(path)
    return _from_hub(name, out)


def copy_files(source: Path, out: Path) -> list[str]:
    """The tokenizer's files that a folder has."""
    found = [name for name in FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, out / name)
    return found


def token_ids(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says of the tokens that begin, end and fill a text."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def end_ids(folder: Path) -> set[int]:
    """The tokens that end a text by a folder's generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found |= {ends} if isinstance(ends, int) else set(ends or ())
    return found


def byte_tokenizer() -> tokenizers.Tokenizer:
    """ids 0..255 are UTF-8 bytes, 256 ends a document, as ByteTokenizer has them."""
    signs = {sign: byte for byte, sign in enumerate(_byte_signs())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=signs, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return tokenizer


def _byte_signs() -> list[str]:
    """The letter that GPT-2's byte-level encoding shows each byte as: printable ones themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _from_file(path: Path, out: Path, name: str) -> dict[str, Any]:
    loaded = load_file(path, name=name)
    shutil.copyfile(path, out / TOKENIZER)
    ending = tokenizers.Tokenizer.from_file(str(path)).id_to_token(loaded.eod_id)
    assert ending is not None, "the id is one of its own"
    return _fast(out, ending, loaded.eod_id)


def _fast(out: Path, ending: str, eod_id: int) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ending, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    return {"eos_token_id": eod_id}


def _add_mask(out: Path) -> None:
    """The mask as the id after the last, as `corpus.mask_tokens` has it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(out / TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(MASK, special=True, normalized=False)])
    tokenizer.save(str(out / TOKENIZER))
    settings = json.loads((out / SETTINGS).read_text()) | {"mask_token": MASK}
    (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _from_hub(name: str, out: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer  # seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, KeyError and others, by the kind of fault
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"data.tokenizer={name} is neither here nor reachable ({reason})") from None
    tokenizer.save_pretrained(out)
    return {"eos_token_id": tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else {}
