"""Published training runs as configs and plans of ours, so that the planner can be judged by what others measured.

A row of runs.csv names source, software stack, model, GPU, plan and what was reported: step time, TFLOP/s, MFU or
tokens/s, all turned into seconds a step here. Where a row leaves something open, what is assumed stands beside it.
Not here: the fit (`recipes/calibrate.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path

from conf.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DType,
    Family,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    Recompute,
    TrainConfig,
    ZeroConfig,
)
from parallel.flops import model_flops_per_token
from parallel.plan import ParallelPlan, padded_vocab_size
from parallel.published.stacks import STACKS, Stack
from parallel.stages import boundaries, uniform

RUNS = Path(__file__).with_name("runs.csv")
COLUMNS = (
    "id", "source", "stack", "model", "params_b", "layers", "hidden", "ffn", "heads", "kv_heads", "seq", "vocab", "gpu",
    "peak_tflops", "gpus", "tp", "pp", "dp", "vpp", "sp", "mbs", "gbs", "zero_stage", "precision", "recompute",
    "iter_time_s", "tflops_per_gpu", "flops_kind", "mfu_pct", "tokens_per_s_per_gpu", "scaling_eff_pct", "note",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """step_s: reported. tflops: of one GPU, by the model FLOPs of `parallel.flops` (recomputation excluded)."""

    id: str
    source: str
    stack: Stack
    nodes: int
    config: Config
    plan: ParallelPlan
    step_s: float

    def tflops(self, step_s: float) -> float:
        tokens = self.plan.global_batch_size * self.config.data.sequence_length
        flops = tokens * model_flops_per_token(self.config.model, self.config.data.sequence_length)
        return flops / step_s / self.plan.world_size / 1e12


@dataclass(frozen=True)
class Unusable:
    """A row that says too little, and what it lacks."""

    id: str
    source: str
    reason: str


def read_runs(path: Path = RUNS) -> tuple[list[PublishedRun], list[Unusable]]:
    """Every row as a run, or why it is none. Raises ValueError for a file that is no such table."""
    runs: list[PublishedRun] = []
    unusable: list[Unusable] = []
    with open(path, newline="") as file:
        reader = csv.DictReader(file, restval="")
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}; the columns are those of {RUNS.name}")
        for row in reader:
            try:
                runs.append(_run(row))
            except ValueError as error:
                unusable.append(Unusable(row["id"], row["source"], str(error)))
    return runs, unusable


def _run(row: dict[str, str]) -> PublishedRun:
    stack = next((stack for stack in STACKS if stack.holds(row)), None)
    if stack is None:
        raise ValueError(f"no calibration for {row['stack']} on {row['gpu']}")
    if "ONE LAYER" in row["model"]:
        raise ValueError("no training step: one layer alone")
    world = _number(row, "gpus")
    tp, pp = _number(row, "tp", 1), _number(row, "pp", 1)
    dp = _number(row, "dp", world // (tp * pp))
    if world != tp * pp * dp:
        raise ValueError(f"{world} GPUs are not tp {tp} x pp {pp} x dp {dp}")
    if not tp * pp * dp:
        raise ValueError(f"tp {tp}, pp {pp} and dp {dp} must be positive")
    # A rate of one replica that states no batch is that of one micro-batch.
    global_batch = _number(row, "gbs", (_number(row, "mbs", 0) or None) if dp == 1 else None)
    micro_batch = _number(row, "mbs", global_batch // dp if stack.accumulates_not else 1)
    if global_batch % (micro_batch * dp):
        raise ValueError(f"global batch {global_batch} is no multiple of micro-batch {micro_batch} x dp {dp}")
    config = _config(row, stack, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=global_batch)
    chunks = _number(row, "vpp", 1)
    interleaved = chunks > 1 and pp > 1 and global_batch // (micro_batch * dp) % pp == 0
    blocks = _blocks(config.model.num_layers, pp * chunks if interleaved else pp, "ebalancing" in row["note"])
    plan = ParallelPlan(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp, world_size=world,
        sequence_parallel=config.parallel.sequence_parallel, schedule="interleaved" if interleaved else "1f1b",
        zero_stage=config.zero.stage, micro_batch_size=micro_batch, global_batch_size=global_batch,
        num_micro_batches=global_batch // (micro_batch * dp), batch_ramp_up=None,
        padded_vocab_size=padded_vocab_size(config.model.vocab_size, divisor=128, tp=tp),
        stage_layers=boundaries(blocks), recompute=config.parallel.recompute.value, recompute_interval=1, warnings=(),
    )  # fmt: skip
    run = PublishedRun(row["id"], row["source"], stack, -(-world // stack.per_node), config, plan, step_s=0.0)
    return replace(run, step_s=_step_s(row, run))


def _config(row: dict[str, str], stack: Stack, *, tp: int, pp: int, micro_batch: int, global_batch: int) -> Config:
    hidden = _number(row, "hidden")
    layers = _number(row, "layers", 0)
    if not layers and row["params_b"]:  # from the size's name: 12 l h^2 parameters in blocks
        layers = round(_float(row, "params_b") * 1e9 / (12 * hidden**2))
    recompute = row["recompute"] or "none"
    if recompute not in Recompute.__members__:
        raise ValueError(f"recompute={recompute} is none of {', '.join(Recompute.__members__)}")
    precision = DType.bf16 if "bf16" in row["precision"].lower() else DType.fp16
    in_fp32 = stack.reduces_fp32 or "fp32 gradient accu" in row["note"]
    return Config(
        model=ModelConfig(
            name=row["model"], family=stack.family, vocab_size=_number(row, "vocab", 51200), hidden_size=hidden,
            num_layers=layers or _number(row, "layers"), num_attention_heads=_number(row, "heads"),
            num_key_value_heads=_number(row, "kv_heads", 0) or None,
            ffn_hidden_size=_number(row, "ffn", 4 * hidden), max_position_embeddings=_number(row, "seq"),
            tie_word_embeddings=stack.family is Family.gpt2, make_vocab_size_divisible_by=128,
        ),
        parallel=ParallelConfig(
            tp=tp, pp=pp, sequence_parallel=row["sp"] == "1" and tp > 1, recompute=Recompute(recompute)
        ),
        zero=ZeroConfig(stage=_number(row, "zero_stage", stack.zero_stage)),
        precision=PrecisionConfig(dtype=precision, grad_accum_dtype=DType.fp32 if in_fp32 else precision),
        data=DataConfig(sequence_length=_number(row, "seq"), mask_documents=False),
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=global_batch),
        cluster=ClusterConfig(
            name=stack.name, devices_per_node=stack.per_node, peak_flops=_float(row, "peak_tflops") * 1e12
        ),
    )  # fmt: skip


def _blocks(layers: int, stages: int, ends_count: bool) -> list[int]:
    """By count; `ends_count`: embedding and head count as a layer each."""
    blocks = [*uniform(layers + 2 if ends_count else layers, stages)]
    if ends_count:
        blocks[0], blocks[-1] = blocks[0] - 1, blocks[-1] - 1
    return blocks


def _step_s(row: dict[str, str], run: PublishedRun) -> float:
    """Of what was reported the most direct: step time, tokens/s, TFLOP/s in its stated form (or as a share of the
    stack's baseline), MFU."""
    config, world = run.config, run.plan.world_size
    model, length, batch = config.model, config.data.sequence_length, run.plan.global_batch_size
    tokens = batch * length
    if row["iter_time_s"]:
        return _float(row, "iter_time_s")
    if row["tokens_per_s_per_gpu"]:
        return tokens / _float(row, "tokens_per_s_per_gpu") / world
    flops = float(tokens * model_flops_per_token(model, length))
    baseline = run.stack.baseline_tflops
    if row["tflops_per_gpu"] or (baseline and row["scaling_eff_pct"]):
        if row["flops_kind"].startswith("hardware") or baseline:  # arXiv:2104.04473 eq. 3, with recomputation
            h, blocks = model.hidden_size, model.num_layers
            flops = 96 * tokens * blocks * h**2 * (1 + length / (6 * h) + model.vocab_size / (16 * blocks * h))
        if row["tflops_per_gpu"]:
            tflops = _float(row, "tflops_per_gpu")
        else:
            tflops = baseline * _float(row, "scaling_eff_pct") / 100
        return flops / (tflops * 1e12) / world
    if row["mfu_pct"] and config.cluster.peak_flops:
        return flops / (_float(row, "mfu_pct") / 100 * config.cluster.peak_flops) / world
    raise ValueError("neither step time nor a rate is reported")


def _number(row: dict[str, str], column: str, default: int | None = None) -> int:
    if not row[column] and default is not None:
        return default
    return int(_float(row, column, least=0))


def _float(row: dict[str, str], column: str, *, least: float | None = None) -> float:
    """Above 0, or at least `least`."""
    if not row[column]:
        raise ValueError(f"{column} is not stated")
    try:
        number = float(row[column])
    except ValueError:
        raise ValueError(f"{column}={row[column]} is not a number") from None
    if not (number > 0 or number == least) or isinf(number):
        raise ValueError(f"{column}={row[column]} is not positive")
    return number


def by_stack(runs: list[PublishedRun]) -> Iterator[tuple[Stack, list[PublishedRun]]]:
    """Runs of each stack that has any, in the order of their ids."""
    for stack in STACKS:
        of_stack = sorted((run for run in runs if run.stack is stack), key=lambda run: run.id)
        if of_stack:
            yield stack, of_stack
