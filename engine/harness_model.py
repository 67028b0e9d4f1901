"""A model of ours as lm-eval knows models: its class on rank 0. lm_eval is imported here.

lm-eval believes that one process is all; what it asks goes to all ranks (`engine.harness`). Texts become tokens as its
own HFLM makes them, by transformers' tokenizer with its special tokens, contexts are cut on the left, and rolling
windows are lm-eval's: the numbers are those of HFLM on the exported folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from conf.schema import GenerateConfig
from corpus.prompts import Prompt
from corpus.scored_rows import continuation_row

LONGEST_ANSWER = 256  # tokens generated where a task does not say, as for HFLM
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


class HarnessModel(TemplateLM):
    """max_length: tokens that the model sees at once; settings: of answers where a task says nothing; ask(what, of): of
    all ranks, "score" of rows or "generate" of (settings, prompts).
    """

    backend = "causal"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        settings: GenerateConfig,
        ask: Callable[[str, Any], Any],
    ) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.max_length, self.settings, self.ask = max_length, settings, ask

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing comes before."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """None: the tokenizer's special tokens, unless the text begins with its first one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        rows = [
            continuation_row(np.array(context), np.array(continuation), sequence_length=self.max_length)
            for _, context, continuation in requests
        ]
        return [(-score.nats, score.all_argmax) for score in self.ask("score", rows)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[list[Encoded]] = []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        found = iter(self._loglikelihood_tokens([window for some in windows for window in some]))
        return [sum(next(found)[0] for _ in some) for some in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Requests of like settings together; each text without its stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found: dict[int, str] = {}
        for numbers in groups.values():
            contexts = [requests[number].args[0] for number in numbers]
            found |= dict(zip(numbers, self._continued(contexts, requests[numbers[0]].args[1]), strict=True))
        return [found[number] for number in range(len(requests))]

    def _continued(self, contexts: Sequence[str], said: dict[str, Any]) -> list[str]:
        """One text a context, the longest contexts computed first."""
        settings, until = self.generation(said)
        prompts = [self._prompt(text, room=self.max_length - settings.max_new_tokens) for text in contexts]
        order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n].ids))
        made = self.ask("generate", (settings, [prompts[n] for n in order]))
        texts = {
            n: self.tokenizer.decode(answer.ids, skip_special_tokens=True)
            for n, answer in zip(order, made, strict=True)
        }
        return [postprocess_generated_text(texts[n], until, None) for n in range(len(prompts))]

    def generation(self, said: Mapping[str, Any]) -> tuple[GenerateConfig, list[str]]:
        """(settings, texts that end an answer) of a task's generation_kwargs. ValueError for those not known here."""
        words = dict(normalize_gen_kwargs(dict(said), LONGEST_ANSWER))
        until = handle_stop_sequences(words.pop("until"), eos=self.tokenizer.decode(self.eot_token_id))
        longest = int(words.pop("max_gen_toks"))
        if longest >= self.max_length:
            raise ValueError(
                f"generates {longest} tokens, and the model sees {self.max_length} at once: no room for a question; "
                "set max_gen_toks in generation_kwargs of its file"
            )
        samples, temperature = words.pop("do_sample"), float(words.pop("temperature", 1.0))
        top_k, top_p = int(words.pop("top_k", 0)), float(words.pop("top_p", 1.0))
        if words.get("num_beams") == 1:
            del words["num_beams"]
        if words:
            raise ValueError(
                f"asks for generation_kwargs {', '.join(f'{key}={words[key]}' for key in sorted(words))}, not known "
                "here; known are until, max_gen_toks, do_sample, temperature, top_k, top_p and num_beams=1"
            )
        settings = replace(
            self.settings, stop=[text for text in until if text], max_new_tokens=longest, top_k=top_k, top_p=top_p,
            temperature=temperature if samples else 0.0,
        )  # fmt: skip
        return settings, until

    def _prompt(self, text: str, *, room: int) -> Prompt:
        begin = self.tokenizer.bos_token
        ids = self.tokenizer.encode(text, add_special_tokens=begin is None or not text.startswith(begin))
        return Prompt(text, text, tuple(ids[-room:]) or (self.prefix_token_id,))
