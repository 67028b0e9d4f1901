"""A conversation as text, and which of its characters the assistant wrote: by the tokenizer's own chat template.

Where the template marks them itself ({% generation %}), its marks are taken. Else a turn is what rendering the messages
up to it adds to rendering those before it with the generation prompt, which is what the model will be given. That
holds only where the template writes a conversation's beginning as it writes it alone; where it does not (one that drops
earlier reasoning, say) the row is refused by name. Of the white space after an end-of-turn token nothing is learnt:
the model stops before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from corpus.chat_tokenizer import ChatTokenizer

Message = Mapping[str, Any]
Span = tuple[int, int]
ASSISTANT = "assistant"
_SHAREGPT = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}


class RowProblem(ValueError):
    """Why a row is no conversation that can be learnt from, without its place."""


@dataclass(frozen=True)
class Rendered:
    """text, and the [start, stop) characters of it that count in the loss, in order."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """The template of a tokenizer. ValueError where it has none."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        if tokenizer.tokenizer.chat_template is None:
            raise ValueError(
                f"data.tokenizer={tokenizer.name} has no chat template, and the rows hold messages; set "
                "data.chat_template=FILE, or give prompt and completion columns"
            )
        try:
            self.template: str = tokenizer.tokenizer.get_chat_template()
            self._render([{"role": "user", "content": "?"}], add_generation_prompt=False)
        except RowProblem:
            pass  # a template may want another first message; what it says stands with the row
        except ValueError as error:  # several templates, none of them the default
            raise ValueError(f"data.tokenizer={tokenizer.name}: {error}; set data.chat_template=FILE") from None
        self.marks = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Raises RowProblem. A message of the assistant with weight 0 does not count (OpenAI's format)."""
        weights = [_weight(message) for message in messages if message["role"] == ASSISTANT]
        text, spans = self._marked(messages) if self.marks else self._by_prefixes(messages)
        if all(weights):
            weights = [1.0] * len(spans)
        if len(spans) != len(weights):
            raise RowProblem(
                f"the template marks {len(spans)} turns of {len(weights)} assistant messages, so their weights cannot "
                "be told apart; leave weight out"
            )
        counted = (span for span, weight in zip(spans, weights, strict=True) if weight and span[0] < span[1])
        return Rendered(text, tuple(counted))

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that an assistant's answer to `messages` follows. Raises RowProblem."""
        return self._render(messages, add_generation_prompt=True)

    def end_of_turn(self) -> str | None:
        """The special token that follows an assistant's message; None where the template writes none."""
        answer = "(an answer)"
        try:
            text = self._render(
                [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": answer}], add_generation_prompt=False
            )
        except RowProblem:  # a template may want another first message
            return None
        after = text.rpartition(answer)[2].lstrip()
        return max((token for token in self.tokenizer.special_tokens if after.startswith(token)), key=len, default=None)

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        [text], [spans] = self._rendered(messages, add_generation_prompt=False, return_assistant_tokens_mask=True)
        return text, [(start, stop) for start, stop in spans]

    def _by_prefixes(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        text, spans = self._render(messages, add_generation_prompt=False), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], add_generation_prompt=True) if number else ""
            upto = self._render(messages[: number + 1], add_generation_prompt=False)
            if not (text.startswith(upto) and upto.startswith(before)):
                raise RowProblem(
                    f"the chat template does not keep what stands before message {number + 1}, so the assistant's "
                    "tokens cannot be told apart; use a template with {% generation %} (data.chat_template=FILE)"
                )
            spans.append((len(before), self._without_tail(text, len(before), len(upto))))
        return text, spans

    def _without_tail(self, text: str, start: int, stop: int) -> int:
        """Where the turn ends: after its end-of-turn token, where only white space follows one."""
        content = text[start:stop].rstrip()
        ends = any(content.endswith(token) for token in self.tokenizer.special_tokens)
        return start + len(content) if ends else stop

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return self._rendered(messages, add_generation_prompt=add_generation_prompt)[0][0]

    def _rendered(self, messages: Sequence[Message], **options: Any) -> tuple[list[str], list[list[Span]]]:
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return render_jinja_template(  # type: ignore[return-value]
                conversations=[plain],
                chat_template=self.template,
                **options,
                **self.tokenizer.tokenizer.special_tokens_map,
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError) as error:
            raise RowProblem(f"the chat template refuses it ({_one_line(error)})") from None


def messages_of(value: object) -> list[dict[str, Any]]:
    """The messages of a row, OpenAI's {role, content} or ShareGPT's {from, value}. Raises RowProblem."""
    if not isinstance(value, list):
        raise RowProblem(f"the messages are {type(value).__name__} {repr(value)[:40]}, not a list")
    return [_message(number, message) for number, message in enumerate(value, start=1)]


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowProblem(f"message {number} is {type(message).__name__}, not an object with role and content")
    if "role" not in message and "from" in message:
        if message["from"] not in _SHAREGPT:
            raise RowProblem(f"message {number} is from {message['from']!r}; known are {', '.join(_SHAREGPT)}")
        message = {"role": _SHAREGPT[message["from"]], "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RowProblem(f"message {number} has no role; it has {', '.join(map(str, message)) or 'nothing'}")
    if content is None and message.get("tool_calls"):
        return {**message, "role": role}
    if not isinstance(content, str):
        raise RowProblem(f"message {number} ({role}): the content is {type(content).__name__}, not a string")
    return {**message, "role": role}


def _weight(message: Message) -> float:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise RowProblem(f"weight {weight!r} of a message is neither 0 nor 1")
    return 1 if weight is None else weight


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
