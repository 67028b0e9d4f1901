"""A composed Hydra config -> the typed Config, checked field by field; and what is logged and compared of it.

Nothing downstream sees a DictConfig. Not here: rules between fields and ranks (`parallel.rules`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import alert_rules
from conf.schema import Config


class ConfigError(ValueError):
    """A config that cannot be; `problems` holds one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Range:
    """What a number may be, and how that reads."""

    holds: Callable[[float], bool]
    text: str


POSITIVE = Range(lambda x: x > 0, "must be positive")
AT_LEAST_0 = Range(lambda x: x >= 0, "must be 0 or more")
SHARE = Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")
ENOUGH = Range(lambda x: x >= 5, "must be 5 or more: two to settle and three that are timed")
KEPT = Range(lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for all")
FACTOR = Range(lambda x: x == 0 or x > 1, "must be above 1, or 0 for none")
UP_TO_1 = Range(lambda x: 0 <= x <= 1, "must be from 0 to 1")
PART = Range(lambda x: 0 < x <= 1, "must be above 0 and at most 1")

# Groups that no training reads.
OF_RECIPES = ("benchmark", "promote", "probe", "plan", "prepare", "generate", "evaluate")
RANGES: dict[Range, str] = {
    POSITIVE: """
        model.vocab_size model.hidden_size model.num_layers model.num_attention_heads model.num_key_value_heads
        model.head_dim model.ffn_hidden_size model.max_position_embeddings model.norm_epsilon model.rope_theta
        model.init_std model.make_vocab_size_divisible_by model.sliding_window model.type_vocab_size
        parallel.tp parallel.pp parallel.version parallel.recompute_interval
        zero.bucket_size precision.loss_scale_window precision.min_loss_scale
        data.bpe_vocab_size data.sequence_length data.wait_timeout_s data.sources.weight data.sources.max_documents
        data.validation_sources.weight data.validation_sources.max_documents
        optimizer.epsilon lora.alpha
        train.micro_batch_size train.global_batch_size train.train_iters train.lr train.max_bad_steps train.lr_decay
        cluster.nodes cluster.devices_per_node cluster.memory_per_device cluster.peak_flops cluster.timeout_s
        cluster.intra_node.bandwidth cluster.inter_node.bandwidth cluster.host.bandwidth
        cluster.rates.matrix_flops cluster.rates.operand_bandwidth cluster.rates.attention_flops
        cluster.rates.memory_bandwidth
        telemetry.log_interval telemetry.wandb.init_timeout_s
        benchmark.steps benchmark.rounds benchmark.cores
        plan.top promote.ranks promote.layers promote.tolerance promote.memory_limit promote.timeout_s
        evaluate.batch_size evaluate.sequence_length evaluate.overlapping_eval evaluate.limit
        probe.smallest_message probe.largest_message probe.trials probe.trial_s
        generate.max_new_tokens generate.num_samples generate.batch_size
    """,
    AT_LEAST_0: """
        precision.initial_loss_scale_power data.num_workers data.sources.eod_id
        optimizer.weight_decay optimizer.clip_grad benchmark.warmup_steps lora.rank
        train.lr_warmup train.eval_interval train.eval_samples train.sample_tokens seed
        evaluate.harness.num_fewshot
        plan.dry_run checkpoint.interval checkpoint.keep_every cluster.hang_timeout_s telemetry.ranks_interval
        cluster.intra_node.latency_s cluster.inter_node.latency_s cluster.host.latency_s cluster.rates.kernel_s
        cluster.rates.micro_batch_s cluster.rates.step_s
        generate.temperature generate.top_k generate.seed
    """,
    KEPT: "checkpoint.keep_last",
    ENOUGH: "promote.steps",
    FACTOR: "train.spike_factor",
    SHARE: """
        model.hidden_dropout model.attention_dropout data.validation_fraction lora.dropout
        optimizer.beta1 optimizer.beta2
    """,
    PART: "model.rotary_fraction generate.top_p",
    UP_TO_1: "train.min_lr_ratio cluster.rates.overlap",
    Range(lambda x: x in (0, 1, 2, 3), "must be 0, 1, 2 or 3"): "zero.stage",
}


def load(cfg: DictConfig) -> Config:
    """The typed Config with every number in its range. Raises ConfigError with every problem."""
    config = typed(cfg)
    problems = range_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def typed(cfg: DictConfig) -> Config:
    """The typed Config, interpolations resolved. Raises ConfigError with every missing value."""
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError([f"{key} has no value; set {key}=..." for key in map(_dotted, missing)])
    try:
        known = OmegaConf.get_type(cfg) is Config  # as Hydra composes it, after config_schema
        config = OmegaConf.to_object(cfg if known else OmegaConf.merge(OmegaConf.structured(Config), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError([" ".join(str(error).split())]) from None
    assert isinstance(config, Config)
    config.alerts, problems = alert_rules.typed(config.alerts)
    if problems:
        raise ConfigError(problems)
    stages = config.parallel.stages
    if not (
        stages is None or stages == "profile" or (isinstance(stages, list) and all(type(n) is int for n in stages))
    ):
        raise ConfigError([f"parallel.stages={stages} is not a way to cut; use null, profile, or a list such as [3,5]"])
    return config


def _dotted(key: str) -> str:
    """OmegaConf's data.sources[0].path as it is typed: data.sources.0.path."""
    return key.replace("[", ".").replace("]", "")


def range_problems(config: Config) -> list[str]:
    """One line for each number that is out of its range, whatever the others are."""
    rules = {name: limit for limit, names in RANGES.items() for name in names.split()}
    problems = []
    for key, value in leaves(config):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        plain = ".".join(part for part in key.split(".") if not part.isdigit())
        if not math.isfinite(value):
            problems.append(f"{key}={value} is not a finite number")
        elif plain in rules and not rules[plain].holds(value):
            problems.append(f"{key}={_shown(value)} {rules[plain].text}")
    for key, name in (("run.id", config.run.id), ("run.experiment", config.run.experiment)):
        if name is not None and not re.fullmatch(r"(\w[\w.=+-]*)?", name):
            problems.append(f"{key}={name} is not one folder name; use letters, digits and . _ - + =")
    if not config.run.experiment:
        problems.append("run.experiment is empty; give it a name")
    if not config.data.sources:
        problems.append("data.sources=[] names no corpus; give at least one source")
    return [*problems, *alert_rules.problems(config.alerts)]


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a dataclass, lists and dicts by index and key."""
    if is_dataclass(value):
        children: Any = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        yield prefix, value
        return
    for name, child in children:
        yield from leaves(child, f"{prefix}.{name}" if prefix else str(name))


def to_plain(value: Any) -> Any:
    """A Config as plain dicts, lists, numbers and strings, for JSON, YAML and wandb."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [to_plain(child) for child in value]
    return value


def from_plain(values: dict[str, Any]) -> Config:
    """The way back from `to_plain`; a knob that is not there keeps its default. Raises ConfigError."""
    return typed(OmegaConf.create(values))


def fingerprint(config: Config) -> str:
    """sha256 of what determines the numbers a run computes: all but where it writes and what it starts from."""
    aside = ("run", "telemetry", "alerts", *OF_RECIPES, "checkpoint", "resume")
    plain = {key: value for key, value in to_plain(config).items() if key not in aside}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
