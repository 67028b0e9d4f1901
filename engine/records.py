"""What a run leaves behind: its folder's files, the sinks on rank 0, memory predicted and measured, the closing
page.
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from types import TracebackType

from conf.load import fingerprint, to_plain
from engine.device import matmul_rate
from engine.distributed import gather
from engine.session import DTYPES, Rates, Session, announce
from parallel.hardware import peak_flops
from parallel.memory import predict
from parallel.sizes import parameter_count
from telemetry.plot import plot_losses
from telemetry.report import EvaluationReport, StepReport
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
        self.wandb_on = False

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
        name = session.device.name
        announce(describe_plan(config, plan, parameters=parameter_count(config.model), device_name=name))
        if session.rank == 0:
            self._write_identity()
            self.sinks = Sinks(self._open_sinks())
        self.memory_before = session.device.memory_bytes()
        return self

    def _write_identity(self) -> None:
        config, plan = self.session.config, self.session.plan
        write_json(self.folder / "config.json", to_plain(config))
        write_json(self.folder / "plan.json", dataclasses.asdict(plan) | {"predicted_bytes": self._predicted()})
        record = identity(
            self.session.run_id,
            config_fingerprint=fingerprint(config),
            corpus_fingerprint=self.corpus_fingerprint,
            seed=config.seed,
            hosts=sorted(set(self.session.hosts)),
        )
        if not (self.folder / "run.json").exists():  # else it goes on: its first start is its identity
            write_json(self.folder / "run.json", record)
        self.timeline.add("start", step=0, **record)

    def _open_sinks(self) -> list[Sink]:
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
            config=to_plain(config),
        )
        self.wandb_on = online is not None
        return [*sinks, online] if online is not None else sinks

    def _predicted(self) -> list[int]:
        """Bytes of each rank, from the plan."""
        config, plan = self.session.config, self.session.plan
        ledgers = predict(config, plan)
        return [ledgers[plan.coordinate(rank)[0]].total for rank in range(plan.world_size)]

    def write(self, report: StepReport | EvaluationReport) -> None:
        self.outcome.add(report)
        self.sinks.write(report)

    def finish(self, sample: str | None) -> None:
        """Print the closing page, draw the loss curve, mark the run complete. Called on all ranks alike."""
        measured = gather(self.session.device.peak_memory_bytes() - self.memory_before)
        if self.session.rank != 0:
            return
        files = {
            "config": self.folder / "config.json",
            "plan": self.folder / "plan.json",
            "metrics": self.folder / "metrics.jsonl",
        }
        if (self.folder / "checkpoints").is_dir():
            files["checkpoints"] = self.folder / "checkpoints"
        if self.session.config.telemetry.plot:
            files["curve"] = self.folder / "loss.png"
            plot_losses(files["metrics"], files["curve"])
            self.sinks.write_image("loss_curve", files["curve"])
        if self.wandb_on:
            files["wandb"] = self.folder / "wandb"
        memory = memory_table(self._predicted(), measured)
        self.sinks.summary = self.outcome.as_summary() | {"measured_bytes": measured}
        print(closing(self.outcome, memory=memory, sample=sample, files=files), flush=True)
        write_json(self.folder / "complete.json", self.outcome.as_summary())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends this rank; let the sinks close first
        self.sinks.__exit__(kind, error, trace)
