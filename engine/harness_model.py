"""A model of ours as lm-eval knows models: its class on rank 0. lm_eval is imported here.

lm-eval believes that one process is all; what it asks goes to all ranks (`engine.harness`). Texts become tokens as its
own HFLM makes them, by transformers' tokenizer with its special tokens, contexts are cut on the left, and rolling
windows are lm-eval's: the numbers are those of HFLM on the exported folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from corpus.scored_rows import Row, continuation_row
from engine.scoring import RowScore

LONGEST_ANSWER = 256  # tokens generated where a task does not say, as for HFLM
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


class HarnessModel(TemplateLM):
    """score: the scores of rows, from all ranks. max_length: tokens that the model sees at once."""

    backend = "causal"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, score: Callable[[list[Row]], list[RowScore]]
    ) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.max_length, self.score = max_length, score

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
        return [(-score.nats, score.all_argmax) for score in self.score(rows)]

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
        raise AssertionError
