"""What a run leaves behind: its folder's files, the sinks on rank 0, what was predicted beside what was measured, the
closing page.
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from conf.load import fingerprint, to_plain
from engine.device import matmul_rate
from engine.distributed import gather
from engine.expected import Expected, expect
from engine.first_steps import FirstSteps
from engine.session import DTYPES, Rates, Session, announce
from parallel.hardware import peak_flops
from parallel.sizes import parameter_count
from telemetry.alert_monitor import AlertMonitor
from telemetry.plot import plot_losses
from telemetry.report import EvaluationReport, StepReport, as_metrics
from telemetry.run_folder import identity, write_json
from telemetry.sinks import ConsoleSink, JsonlSink, Sink, Sinks
from telemetry.summary import Outcome, closing, describe_plan, memory_table
from telemetry.timeline import Timeline
from telemetry.wandb_sink import open_wandb


class RunRecords:
    """with RunRecords(session, ...) as records: ... — on every rank alike; only rank 0 writes."""

    def __init__(self, session: Session, *, corpus_fingerprint: str):
        self.session = session
        self.corpus_fingerprint = corpus_fingerprint
        self.outcome = Outcome()
        self.sinks = Sinks([])
        self.timeline = Timeline(self.folder / "timeline.jsonl" if session.rank == 0 else None)
        self.memory_before = 0
        self.expected: Expected | None = None
        self.is_compared = False
        self.wandb_on = False
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
        self.memory_before = session.device.memory_bytes()
        self.first_steps = FirstSteps(
            session, collectives=config.telemetry.time_collectives, memory_before=self.memory_before
        )
        return self

    def _write_identity(self, expected: Expected) -> None:
        config, plan = self.session.config, self.session.plan
        write_json(self.folder / "config.json", to_plain(config))
        about: dict[str, Any] = {"predicted_bytes": self._predicted(), "profile": expected.identity}
        about |= {"predicted": expected.predicted, "observed": expected.observed}
        write_json(self.folder / "plan.json", dataclasses.asdict(plan) | about)
        record = identity(
            self.session.run_id,
            config_fingerprint=fingerprint(config),
            corpus_fingerprint=self.corpus_fingerprint,
            seed=config.seed,
            hosts=sorted(set(self.session.hosts)),
        ) | {"profile": expected.identity}
        if not (self.folder / "run.json").exists():  # else it goes on: its first start is its identity
            write_json(self.folder / "run.json", record)
        self.timeline.add("start", step=0, **record)

    def _open_sinks(self, expected: Expected) -> list[Sink]:
        config = self.session.config
        sinks: list[Sink] = [
            JsonlSink(self.folder / "metrics.jsonl"),
            ConsoleSink(interval=config.telemetry.log_interval),
        ]
        online = open_wandb(
            config.telemetry.wandb,
            run_id=self.session.run_id,
            folder=self.folder,
            experiment=config.run.experiment,
            default_name=f"{config.run.experiment}-{self.session.plan.label}",
            config=to_plain(config) | {"profile": expected.identity},
        )
        self.wandb_on = online is not None
        return [*sinks, online] if online is not None else sinks

    def _predicted(self) -> list[int]:
        """Bytes of each rank, from the plan."""
        assert self.expected is not None
        plan, ledgers = self.session.plan, self.expected.predicted["memory"]
        return [ledgers[plan.coordinate(rank)[0]]["total"] for rank in range(plan.world_size)]

    def write(self, report: StepReport | EvaluationReport) -> None:
        """Called on all ranks alike."""
        self.outcome.add(report)
        self.sinks.write(report)
        if self.alerts is not None:
            self.alerts.observe(as_metrics(report), None, self.sinks)
        if isinstance(report, StepReport) and self.first_steps.add(report):
            self._compare()

    def alert(self) -> dict[str, Any] | None:
        """The event of the alert that asks to stop the run, on rank 0."""
        return self.alerts.stop if self.alerts is not None else None

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
        if self.wandb_on:
            files["wandb"] = self.folder / "wandb"
        # On a CPU the process holds libraries and allocator slack too: what its tensors hold stands in prediction.json.
        memory = memory_table(self._predicted(), measured) if self.session.device.kind == "cuda" else None
        self.sinks.summary |= self.outcome.as_summary() | {"measured_bytes": measured}
        print(closing(self.outcome, memory=memory, sample=sample, files=files), flush=True)
        write_json(self.folder / "complete.json", self.outcome.as_summary())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends this rank; let the sinks close first
        self.sinks.__exit__(kind, error, trace)
