"""Whether a tokenizer's ids are all rows of the model's embedding, and what would work where they are not.

transformers adds the tokens that a tokenizer's class wants and its files lack, behind all others: a folder of Qwen2
whose tokenizer.json has the model's 600 ids may load with 601.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from corpus.tokenizer import load_auto, load_file

NAMED = 3  # so many tokens beyond the embedding at most are named, others counted


class Vocabulary(Protocol):
    """A `corpus.tokenizer.Tokenizer` or a `corpus.chat_tokenizer.ChatTokenizer`."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def vocabulary(self) -> dict[str, int]: ...


def require_vocabulary(tokenizer: Vocabulary, *, vocab_size: int, weights: bool = False) -> None:
    """ValueError where the tokenizer has ids that the model's embedding lacks. weights: some are given, so that the
    embedding is what it is.
    """
    if tokenizer.size <= vocab_size:
        return
    line = f"model.vocab_size={vocab_size} is smaller than the {tokenizer.size} ids of data.tokenizer={tokenizer.name}"
    if not weights:
        raise ValueError(f"{line}; set model.vocab_size={tokenizer.size} or use a smaller tokenizer")
    beyond = sorted((id_, token) for token, id_ in tokenizer.vocabulary().items() if id_ >= vocab_size)
    named = f"the last {len(beyond):,} of them"
    if len(beyond) <= NAMED:
        named = ", ".join(f"{token} ({id_})" for id_, token in beyond)
    ways = _ways(tokenizer.name, [token for _, token in beyond], vocab_size)
    raise ValueError(f"{line}, and the weights have no row for {named}; {ways}")


def _ways(name: str, beyond: list[str], vocab_size: int) -> str:
    """What would work, tried out: the folder's tokenizer.json alone; another special token in its settings."""
    folder, found = Path(name), []
    if (folder / "tokenizer.json").is_file() and _fits_alone(folder / "tokenizer.json", vocab_size):
        found.append(f"set data.tokenizer={folder / 'tokenizer.json'}, which has none of them but no chat template")
    if (folder / "tokenizer_config.json").is_file() and (roles := _other_roles(name, beyond, vocab_size)):
        says = ", ".join(f'"{role}": "{token}"' for role, token in roles.items())
        found.append(f"write {says} into {folder / 'tokenizer_config.json'}")
    return ", or ".join(found) or (
        f"set data.tokenizer to one whose ids are all below {vocab_size}, such as the one that these weights were "
        "trained with"
    )


def _fits_alone(path: Path, vocab_size: int) -> bool:
    try:
        return load_file(path, name=str(path)).size <= vocab_size
    except ValueError:  # it names no end of document
        return False


def _other_roles(name: str, beyond: list[str], vocab_size: int) -> dict[str, str]:
    """Special tokens beyond the embedding, by what they are for, with the end of text in their place; nothing where
    that does not take them away."""
    tokenizer, _ = load_auto(name)
    end = tokenizer.eos_token
    roles = {role: end for role, token in tokenizer.special_tokens_map.items() if token in beyond}
    if not roles or end is None or end in beyond:
        return {}
    changed, _ = load_auto(name, **roles)
    return roles if max(changed.get_vocab().values()) < vocab_size else {}
