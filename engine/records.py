"""What a run leaves behind: its folder's files, the sinks on rank 0, what was predicted beside what was measured, the
closing page.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from conf.load import fingerprint, to_plain
from conf.profile_windows import profile_windows
from engine.checkpoint_folder import checkpoint_path
from engine.deepspeed_config import deepspeed_config
from engine.device import matmul_rate
from engine.distributed import gather
from engine.expected import Expected, expect
from engine.first_steps import FirstSteps
from engine.meters import Meters
from engine.profile_window import ProfileWindow
from engine.session import DTYPES, Rates, Session, announce
from parallel.hardware import peak_flops
from parallel.sizes import parameter_count
from telemetry import jsonl
from telemetry.alert_monitor import AlertMonitor
from telemetry.plot import plot_losses
from telemetry.redact import redacted
from telemetry.report import EvaluationReport, StepReport, as_metrics
from telemetry.run_folder import identity, restart_record, write_json, write_start
from telemetry.schedule_plot import plot_timeline
from telemetry.sinks import ConsoleSink, JsonlSink, Sink, Sinks, rank_rows
from telemetry.summary import Outcome, closing, describe_plan, memory_table
from telemetry.tensorboard_sink import open_tensorboard
from telemetry.timeline import Timeline
from telemetry.trace_overlap import Profiled
from telemetry.wandb_sink import open_wandb


class RunRecords:
    """with RunRecords(session, ...) as records: ... — on every rank alike; only rank 0 writes."""

    def __init__(self, session: Session, *, corpus_fingerprint: str, tokenizer_fingerprint: str):
        self.session = session
        self.fingerprints = {"corpus_fingerprint": corpus_fingerprint, "tokenizer_fingerprint": tokenizer_fingerprint}
        self.outcome = Outcome()
        self.sinks = Sinks([])
        self.timeline = Timeline(self.folder / "timeline.jsonl" if session.rank == 0 else None)
        self.memory_before = 0
        self.expected: Expected | None = None
        self.is_compared = False
        self.alerts: AlertMonitor | None = None  # on rank 0

    @property
    def folder(self) -> Path:
        assert self.session.folder is not None
        return self.session.folder

    def __enter__(self) -> RunRecords:
        session, config, plan = self.session, self.session.config, self.session.plan
        dtype = config.precision.dtype
        measured = gather(matmul_rate(session.device, DTYPES[dtype]))
        self.rates = Rates(
            peak=config.cluster.peak_flops or peak_flops(session.device.name, dtype.value),
            measured=sum(measured) / len(measured),
        )
        if session.rank == 0:
            self.expected = expected = expect(config, plan, session.device)
            name, parameters = session.device.name, parameter_count(config.model)
            announce(describe_plan(config, plan, parameters=parameters, device_name=name, profile=expected.line()))
            self._write_identity(expected)
            self.alerts = AlertMonitor(config.alerts, self.folder, timeline=self.timeline)
            announce(self.alerts.start_page())
            self.sinks = Sinks(self._open_sinks(expected))
            self.timeline.listener = self._hear
        self.memory_before = session.device.memory_bytes()
        self.first_steps = FirstSteps(
            session, collectives=config.telemetry.time_collectives, memory_before=self.memory_before
        )
        asked = config.telemetry.profile
        windows = profile_windows(asked.steps)
        ledger: list[int] = []
        if self.expected is not None and session.device.kind == "cuda":  # a CPU's process holds libraries too
            ledger = [one["total"] for one in self.expected.predicted["memory"]]
        self.meters = Meters(
            session, self.first_steps, interval=config.telemetry.ranks_interval, memory_before=self.memory_before,
            ledger=ledger, profile=ProfileWindow(session, windows, asked.ranks) if windows else None,
        )  # fmt: skip
        return self

    def _write_identity(self, expected: Expected) -> None:
        session, config, plan = self.session, self.session.config, self.session.plan
        record = identity(
            session.run_id, config_fingerprint=fingerprint(config), **self.fingerprints, seed=config.seed,
            cluster=config.cluster.name, hosts=session.hosts, device=session.device.name, profile=expected.identity,
        )  # fmt: skip
        about: dict[str, Any] = {"predicted_bytes": self._predicted(), "profile": expected.identity}
        about |= {"predicted": expected.predicted, "observed": expected.observed}
        again = restart_record()
        kept = record if again is None else record | {"restart": again}
        start = write_start(
            self.folder, kept, config=to_plain(config), plan=dataclasses.asdict(plan) | about,
            deepspeed=deepspeed_config(config, plan, num_micro_batches=plan.num_micro_batches),
        )  # fmt: skip
        self.timeline.add("start", step=0, **record, start=start)

    def _open_sinks(self, expected: Expected) -> list[Sink]:
        config = self.session.config
        sinks: list[Sink] = [
            JsonlSink(self.folder / "metrics.jsonl"),
            JsonlSink(self.folder / "ranks.jsonl", rank_rows),
            ConsoleSink(interval=config.telemetry.log_interval),
        ]
        online = open_wandb(
            config.telemetry.wandb,
            run_id=self.session.run_id,
            folder=self.folder,
            experiment=config.run.experiment,
            default_name=f"{config.run.experiment}-{self.session.plan.label}",
            config=redacted(to_plain(config) | {"profile": expected.identity}),
            tags=self._tags(expected),
        )
        board = open_tensorboard(self.folder / "tensorboard") if config.telemetry.tensorboard else None
        return [*sinks, *(sink for sink in (online, board) if sink is not None)]

    def _tags(self, expected: Expected) -> list[str]:
        """What runs are told apart by; of the standing what comes before its reasons."""
        config, plan = self.session.config, self.session.plan
        of_plan = [plan.label.rpartition("_")[0], f"zero{plan.zero_stage}", plan.schedule]
        return [*of_plan, config.model.name, config.precision.dtype.value, expected.standing.split(":")[0]]

    def _predicted(self) -> list[int]:
        """Bytes of each rank, from the plan."""
        assert self.expected is not None
        plan, ledgers = self.session.plan, self.expected.predicted["memory"]
        return [ledgers[plan.coordinate(rank)[0]]["total"] for rank in range(plan.world_size)]

    def write(self, report: StepReport | EvaluationReport) -> None:
        """Called on all ranks alike."""
        start = time.perf_counter()
        if self.session.rank == 0 and isinstance(report, StepReport) and report.step > 1 and not self.outcome.steps:
            self.outcome.go_on(jsonl.rows(self.folder / "metrics.jsonl"), step=report.step)
        self.outcome.add(report)
        self.sinks.write(report)
        if self.alerts is not None:
            ranks = [row["ranks"] for row in rank_rows(report)]
            self.alerts.observe(as_metrics(report), ranks[0] if ranks else None, self.sinks)
        if isinstance(report, StepReport) and report.profiled is not None:
            self._note_profile(report.profiled)
        self.meters.written_s = time.perf_counter() - start
        if isinstance(report, StepReport) and self.first_steps.add(report):
            self._compare()

    def alert(self) -> dict[str, Any] | None:
        """The event of the alert that asks to stop the run, on rank 0."""
        return self.alerts.stop if self.alerts is not None else None

    def _note_profile(self, profiled: Profiled) -> None:
        message = f"profiled {profiled.steps}: {', '.join(profiled.paths.values())}"
        if profiled.overlap_share is not None:
            message += f"; {profiled.overlap_share:.0%} of communication beside computation"
        message = "; ".join([message, *profiled.reasons])
        self.timeline.add("profiled", step=profiled.last_step, message=message, **dataclasses.asdict(profiled))

    def _compare(self) -> None:
        """Print and keep what was predicted beside what the first steps took. Called on all ranks alike."""
        self.is_compared = True
        ranks, steps = self.first_steps.results()
        if self.expected is not None:
            comparison = self.expected.beside(ranks, steps)
            print(f"\n{comparison.text()}\n", flush=True)
            write_json(self.folder / "prediction.json", comparison.as_json())
            self.sinks.summary |= comparison.as_summary()

    def finish(self, sample: str | None) -> None:
        """Print the closing page, draw the loss curve, mark the run complete. Called on all ranks alike."""
        if self.outcome.steps and not self.is_compared:
            self._compare()
        measured = gather(self.session.device.peak_memory_bytes() - self.memory_before)
        if self.session.rank != 0:
            return
        files = {
            "config": self.folder / "config.json",
            "plan": self.folder / "plan.json",
            "metrics": self.folder / "metrics.jsonl",
        }
        if self.is_compared:
            files["prediction"] = self.folder / "prediction.json"
        if (self.folder / "checkpoints").is_dir():
            files["checkpoints"] = self.folder / "checkpoints"
        if self.session.config.telemetry.plot:
            files["curve"] = self.folder / "loss.png"
            plot_losses(files["metrics"], files["curve"])
            self.sinks.write_image("loss_curve", files["curve"])
            self._draw_schedule(files)
        for name in ("wandb", "tensorboard", "traces"):
            if (self.folder / name).is_dir():
                files[name] = self.folder / name
        # On a CPU the process holds libraries and allocator slack too: what its tensors hold stands in prediction.json.
        memory = memory_table(self._predicted(), measured) if self.session.device.kind == "cuda" else None
        self.sinks.summary |= self.outcome.as_summary() | {"measured_bytes": measured}
        predicted = self.expected.predicted if self.expected is not None else {}
        print(closing(self.outcome, predicted=predicted, memory=memory, sample=sample, files=files), flush=True)
        summary = self.outcome.as_summary()
        write_json(self.folder / "complete.json", summary)
        self.timeline.add("end", step=self.session.config.train.train_iters, outcome="complete", **summary)

    def _draw_schedule(self, files: dict[str, Path]) -> None:
        """A step as it is predicted, where its times are."""
        assert self.expected is not None
        if self.expected.timeline is not None and self.session.plan.pipeline_model_parallel_size > 1:
            files["schedule"] = self.folder / "schedule.png"
            plot_timeline(self.expected.timeline, files["schedule"])
            self.sinks.write_image("predicted_schedule", files["schedule"])

    def _hear(self, row: dict[str, Any]) -> None:
        """Told of every event on rank 0."""
        if row["event"] == "checkpoint":
            path = checkpoint_path(self.folder / "checkpoints", row["step"])
            self.sinks.write_checkpoint(path, {name: row[name] for name in ("step", "bytes", "checksum")})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends this rank; let the sinks close first
        self.sinks.__exit__(kind, error, trace)
