"""What a run prints at its start and at its end, as text. Values in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from conf.schema import Config
from parallel import stage_split
from parallel.adapters import adapter_count
from parallel.plan import ParallelPlan
from telemetry.ranks import Slowest
from telemetry.report import EvaluationReport, StepReport
from telemetry.sinks import duration
from telemetry.tables import size, table

OVER_RANKS = (
    "pipeline/bubble", "pipeline/imbalance", "pipeline/recompute_share", "communication/exposed_share",
    "ranks/slowdown", "memory/peak_bytes",
)  # fmt: skip
WARM_STEPS = 2  # first steps that medians leave out: allocation, first use of kernels


@dataclass
class Outcome:
    """What the reports of a run amount to. Give every report to `add`."""

    first_loss: float | None = None
    last_loss: float | None = None
    validation: list[EvaluationReport] = field(default_factory=list)
    skipped: int = 0
    steps: list[StepReport] = field(default_factory=list)  # without what all ranks told: a run has many of both
    over_ranks: list[dict[str, float]] = field(default_factory=list)
    slowest: Slowest | None = None  # when they told last

    def go_on(self, rows: Iterable[Mapping[str, Any]], *, step: int) -> None:
        """Take up a run that trained before: rows of its metrics.jsonl; those from `step` on are trained again."""
        kept = {("validation/loss" in row, row["step"]): row for row in rows if row["step"] < step}
        losses = [row["train/loss"] for (evaluated, _), row in sorted(kept.items()) if not evaluated]
        self.first_loss = losses[0] if losses else None
        self.validation = [
            EvaluationReport(row["step"], row["tokens"], row["flops"], row["hours"], row["validation/loss"])
            for (evaluated, _), row in sorted(kept.items())
            if evaluated
        ]

    def add(self, report: StepReport | EvaluationReport) -> None:
        if isinstance(report, EvaluationReport):
            self.validation.append(report)
            return
        self.steps.append(replace(report, ranks=None, instructions={}))
        if report.ranks is not None:
            found = report.ranks.as_metrics()
            self.over_ranks.append({name: found[name] for name in OVER_RANKS})
            self.slowest = report.ranks.slowest
        self.first_loss = report.loss if self.first_loss is None else self.first_loss
        self.last_loss = report.loss
        self.skipped = report.skipped_steps

    def median_of(self, name: str) -> float | None:
        """Median of a step value, warm-up steps left out; None where it is unknown."""
        steps = self.steps[WARM_STEPS:] or self.steps
        values = [getattr(step, name) for step in steps if getattr(step, name) is not None]
        return median(values) if values else None

    def median_over_ranks(self, name: str) -> float | None:
        """Median of a value that all ranks told now and then; None where they never did."""
        return median(row[name] for row in self.over_ranks) if self.over_ranks else None

    def as_summary(self) -> dict[str, Any]:
        """Flat numbers for sinks that keep one set a run."""
        best = min((report.loss for report in self.validation), default=None)
        last = self.validation[-1].loss if self.validation else None
        return {
            "final/train_loss": self.last_loss,
            "final/validation_loss": last,
            "best/validation_loss": best,
            "median/tokens_per_s": self.median_of("tokens_per_s"),
            "median/step_time_s": self.median_of("step_time_s"),
            "median/mfu": self.median_of("mfu"),
            "median/mfu_of_measured_rate": self.median_of("mfu_of_measured_rate"),
            "skipped_steps": self.skipped,
        } | {f"median/{name}": self.median_over_ranks(name) for name in OVER_RANKS}


def describe_plan(config: Config, plan: ParallelPlan, *, parameters: int, device_name: str, profile: str) -> str:
    """Model, plan and stages in a few lines."""
    batches = f"{plan.global_batch_size} samples = {plan.data_parallel_size} data ranks x {plan.num_micro_batches} "
    batches += f"micro-batches x {plan.micro_batch_size}"
    stages = ", ".join(f"{last - first}" for first, last in plan.stage_layers)
    lines = [
        f"model     {config.model.name}: {parameters:,} parameters, {config.model.family.value}, "
        f"{config.model.num_layers} layers x {config.model.hidden_size}, {config.precision.dtype.value}",
        *_adapters(config),
        f"plan      tp={plan.tensor_model_parallel_size}"
        f" x pp={plan.pipeline_model_parallel_size} x dp={plan.data_parallel_size}, ZeRO {plan.zero_stage},"
        f" {plan.schedule}, recompute {plan.recompute}" + (", sequence parallel" if plan.sequence_parallel else ""),
        f"profile   {profile}",
        f"stages    {stages} layers (embedding, blocks, norm and head), bubble {plan.bubble:.0%} by (P-1)/(M+P-1)",
        *([f"          {stage_split.describe(config, plan)}"] if plan.pipeline_model_parallel_size > 1 else []),
        f"batch     {batches}, {config.data.sequence_length} tokens each",
        f"device    {plan.world_size} x {device_name}",
    ]
    return "\n".join([*lines, *(f"warning   {warning}" for warning in plan.warnings)])


def _adapters(config: Config) -> list[str]:
    lora = config.lora
    if lora.rank == 0:
        return []
    targets = ", ".join(lora.target_modules)
    return [f"adapters  LoRA of rank {lora.rank} for {targets}: {adapter_count(config):,} trained, the rest frozen"]


def memory_table(predicted: Sequence[int], measured: Sequence[int]) -> str:
    """Predicted bytes of each rank, and by how much its device's peak grew from before the model was built."""
    rows = [
        (rank, size(guess), size(real), f"{real / guess:.2f}")
        for rank, (guess, real) in enumerate(zip(predicted, measured, strict=True))
    ]
    return table(("rank", "memory predicted", "peak measured", "ratio"), rows)


def closing(
    outcome: Outcome, *, predicted: Mapping[str, Any], memory: str | None, sample: str | None, files: dict[str, Path]
) -> str:
    """The last page of a run. predicted: as `parallel.record.predicted` has it."""
    if not outcome.steps:
        return "\n".join(["", "no step was left to train", "", "files:", *_listed(files)])
    lines = ["", f"train loss       {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}"]
    if outcome.validation:
        first, last = outcome.validation[0].loss, outcome.validation[-1].loss
        lines.append(f"validation loss  {first:.4f} -> {last:.4f}")
    tokens_per_s, step_time = outcome.median_of("tokens_per_s"), outcome.median_of("step_time_s")
    lines.append(f"speed            {tokens_per_s:,.0f} tokens/s, {step_time:.2f} s a step (medians)")
    mfu, of_measured = outcome.median_of("mfu"), outcome.median_of("mfu_of_measured_rate")
    if mfu is not None:
        lines.append(f"MFU              {mfu:.1%} of the data sheet's peak (model FLOPs, recomputation excluded)")
    if of_measured is not None:
        lines.append(f"MFU              {of_measured:.1%} of the matrix rate measured here (recomputation excluded)")
    lines += _over_ranks(outcome, predicted)
    spent = sum(step.telemetry_time_s for step in outcome.steps)
    if outcome.skipped:
        lines.append(f"skipped steps    {outcome.skipped}")
    total = sum(step.step_time_s for step in outcome.steps)
    lines.append(
        f"time             {duration(total)} in {len(outcome.steps)} steps; telemetry {spent / total:.2%} of it"
    )
    if memory is not None:
        lines += ["", memory]
    if sample is not None:
        lines += ["", "a sample of the model's own text:", *(f"    {line}" for line in sample.splitlines())]
    return "\n".join([*lines, "", "files:", *_listed(files)])


def _over_ranks(outcome: Outcome, predicted: Mapping[str, Any]) -> list[str]:
    """What all ranks told, beside what was predicted of it."""
    bubble, imbalance, again, exposed, *_ = map(outcome.median_over_ranks, OVER_RANKS)
    slow = outcome.slowest
    if bubble is None or exposed is None or slow is None:
        return []
    expected = predicted.get("bubble")
    guess = "" if expected is None else f" ({sum(expected) / len(expected):.0%} predicted)"
    other = "" if predicted.get("imbalance") is None else f" ({predicted['imbalance']:.2f} predicted)"
    return [
        f"pipeline         bubble {bubble:.0%}{guess}, stage imbalance {imbalance:.2f}{other}, "
        f"recomputation {again:.0%} of the passes",
        f"ranks            {exposed:.0%} of a step waits for collectives and transfers; "
        f"slowest at last rank {slow.rank} on {slow.host}, {slow.slowdown:.2f} x its peers",
    ]


def _listed(files: dict[str, Path]) -> list[str]:
    return [f"    {what:<11} {path}" for what, path in files.items()]
