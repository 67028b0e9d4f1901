"""The keys of one config.json, each asked for once, and what is wrong with them. Pure Python.

Not here: what each family makes of them (`conf.huggingface`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conf.schema import Activation

# What says nothing about the numbers of a language model: where it comes from, its heads for other tasks, how it
# is run, token ids that generation begins and ends with, and the defaults of generation that old versions kept here.
_ASIDE = """
    _name_or_path architectures transformers_version dtype torch_dtype model_type name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    id2label label2id num_labels problem_type task_specific_params finetuning_task tokenizer_class prefix
    classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_cache output_attentions output_hidden_states return_dict torchscript use_bfloat16 chunk_size_feed_forward
    _attn_implementation attn_implementation _attn_implementation_autoset gradient_checkpointing is_decoder
    tie_encoder_decoder cross_attention_hidden_size pretraining_tp n_ctx tf_legacy_loss
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    attention_probs_dropout_prob hidden_dropout_prob
"""
WITHOUT_EFFECT = frozenset(_ASIDE.split())
ACTIVATIONS = {
    "gelu_new": Activation.gelu_tanh, "gelu_pytorch_tanh": Activation.gelu_tanh, "gelu_fast": Activation.gelu_tanh,
    "gelu": Activation.gelu, "relu": Activation.relu, "silu": Activation.silu, "swish": Activation.silu,
}  # fmt: skip


class Keys:
    """The keys of one config.json, each asked for once, and what is wrong with them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.asked = config, set(WITHOUT_EFFECT)
        self.wrong: list[str] = []

    def get(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        return self.config.get(key, default)

    def number(self, key: str, default: int | float | None) -> Any:
        value = self.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.wrong.append(f"{key}={json.dumps(value)} is not a number")
            return default
        return value

    def count(self, key: str, default: int | None) -> Any:
        value = self.number(key, default)
        if value is not None and (not isinstance(value, int) or value < 1):
            self.wrong.append(f"{key}={value} is not a whole number of 1 or more")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.wrong.append(f"{key}={json.dumps(value)} is neither true nor false")
        return bool(value)

    def must_be(self, key: str, *allowed: Any) -> None:
        """The first of `allowed` is the default."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            self.wrong.append(f"{key}={json.dumps(value)} is not supported; {json.dumps(allowed[0])} is")


def activation(keys: Keys, key: str, default: str) -> Activation | None:
    name = keys.get(key, default)
    if name not in ACTIVATIONS:
        keys.wrong.append(f"{key}={json.dumps(name)} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(name)
