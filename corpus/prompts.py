"""Prompts to token ids: texts and conversations of the command line and of files, by the tokenizer of the weights.

Special tokens that a prompt spells out are read as such, as in transformers; whoever passes on text of others must take
them out. A prompt without a token begins like a document: with the beginning of text, or the end of another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import CorpusSource, GenerateConfig
from corpus.chat_template import ASSISTANT, ChatTemplate, RowProblem, messages_of
from corpus.chat_tokenizer import ChatTokenizer
from corpus.readers import Tally, rows
from corpus.rows import Columns
from corpus.sources import resolve

Given = str | list[dict[str, Any]]
COLUMNS = Columns((("messages",), ("prompt",), ("text",)), of_text=False, knobs="messages, prompt or text in each row")


@dataclass(frozen=True)
class Prompt:
    """given: as the user gave it, a text or messages; text: what its ids stand for."""

    given: Given
    text: str
    ids: tuple[int, ...]


def read_prompts(
    settings: GenerateConfig, tokenizer: ChatTokenizer, *, add_bos: bool, vocab_size: int, positions: int
) -> list[Prompt]:
    """All prompts in order. add_bos: of plain texts. Raises ValueError with every problem that the prompts have."""
    if settings.system is not None and not settings.chat:
        raise ValueError("generate.system is a message of a conversation; set generate.chat=true")
    if "" in settings.stop:
        raise ValueError("generate.stop has an empty text, which ends everything at once; leave it out")
    template = ChatTemplate(tokenizer) if settings.chat else None
    prompts, problems = [], []
    for where, given in _given(settings):
        try:
            prompt = _prompt(given, settings, tokenizer, template, add_bos=add_bos)
            _require_fit(prompt, tokenizer, vocab_size=vocab_size, positions=positions)
            prompts.append(prompt)
        except RowProblem as problem:
            problems.append(f"{where}: {problem}")
    if problems:
        raise ValueError("\n".join(problems))
    if not prompts:
        raise ValueError('there is no prompt; give prompt="...", generate.prompts=[...] or generate.prompts_file=FILE')
    return prompts


def _given(settings: GenerateConfig) -> Iterator[tuple[str, object]]:
    """(where, text or messages) of each."""
    for number, text in enumerate(settings.prompts):
        yield f"generate.prompts.{number}", text
    if settings.prompts_file is None:
        return
    path = Path(settings.prompts_file).expanduser()
    found = list(_lines(path) if path.suffix == ".txt" else _rows(path))
    if not found:
        raise ValueError(f"generate.prompts_file={path} holds no prompt")
    yield from found


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    for row in rows(resolve(CorpusSource(path=str(path))), COLUMNS, Tally()):
        if row.problem is not None:
            raise ValueError(f"generate.prompts_file: {row.where()}: {row.problem}")
        yield row.where(), row.value


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"generate.prompts_file={path} cannot be read ({error})") from None
    yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())


def _prompt(
    given: object, settings: GenerateConfig, tokenizer: ChatTokenizer, template: ChatTemplate | None, *, add_bos: bool
) -> Prompt:
    if template is None:
        if not isinstance(given, str):
            raise RowProblem(
                "it holds messages; set generate.chat=true" if isinstance(given, list) else "it has no text"
            )
        ids = _encoded(given, tokenizer)
        starts = tokenizer.bos_id if add_bos else None
        if starts is not None and ids[:1] != [starts]:
            ids.insert(0, starts)
        return Prompt(given, given, tuple(ids) or (tokenizer.eos_id,))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else messages_of(given)
    if settings.system is not None:
        messages = [{"role": "system", "content": settings.system}, *messages]
    if not messages or messages[-1]["role"] == ASSISTANT:
        raise RowProblem("the assistant has nothing to answer: its message is the last one, or there is none")
    text = template.prompt(messages)
    return Prompt(given if isinstance(given, str) else messages, text, tuple(_encoded(text, tokenizer)))


def _encoded(text: str, tokenizer: ChatTokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(f"it is not UTF-8 at character {error.start}") from None
    return list(tokenizer.encode([text])[0].ids)


def _require_fit(prompt: Prompt, tokenizer: ChatTokenizer, *, vocab_size: int, positions: int) -> None:
    if len(prompt.ids) >= positions:
        raise RowProblem(
            f"it has {len(prompt.ids)} tokens, and model.max_position_embeddings={positions} leaves no room for more; "
            f"use at most {positions - 1}"
        )
    if max(prompt.ids) >= vocab_size:
        raise RowProblem(
            f"token {max(prompt.ids)} of data.tokenizer={tokenizer.name} is none of model.vocab_size={vocab_size}; use "
            "the tokenizer of these weights"
        )
