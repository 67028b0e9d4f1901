"""Weights & Biases on rank 0. The only home of wandb: without it, or without its service, training goes on.

Names and x-axes are the same for every plan, so that runs compare out of the box: step (the default), tokens.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Literal

from conf.schema import WandbConfig, WandbMode
from telemetry.report import EvaluationReport, StepReport, as_metrics

LONGEST_TAG = 64  # characters; wandb refuses longer ones
LONGEST_NAME = 128  # characters; the service refuses longer ones when an offline run is synced


def shortened(text: str, longest: int, what: str) -> str:
    """`text` cut to `longest` characters, with a warning where something was cut."""
    if len(text) <= longest:
        return text
    print(f"warning: wandb {what} cut to {longest} characters: {text[:longest]}", file=sys.stderr, flush=True)
    return text[:longest]


class WandbSink:
    """One wandb run."""

    def __init__(self, run: Any):
        self.run = run
        self.alerts_fail = False
        run.define_metric("step")
        for prefix in ("train", "validation"):
            run.define_metric(f"{prefix}/*", step_metric="step")
        run.define_metric("validation/loss", summary="min,last", step_metric="step")

    def write(self, report: StepReport | EvaluationReport) -> None:
        self.run.log(as_metrics(report))

    def write_image(self, name: str, path: Path) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(path))})

    def alert(self, title: str, text: str, level: str) -> None:
        """To whoever the project's settings say (mail, Slack). Offline runs keep it until they are synced."""
        levels = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
        try:  # 0 would mean wandb's minute between alerts
            self.run.alert(title=title[:63], text=text, level=levels[level], wait_duration=0.001)
        except Exception as error:  # anything wandb raises must not end a training run, nor the metrics it still takes
            if not self.alerts_fail:
                print(f"warning: wandb alerts fail, metrics go on: {error!r}", file=sys.stderr, flush=True)
            self.alerts_fail = True

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish(exit_code=1 if failed else 0)
        import wandb

        wandb.teardown()  # finish returns before the service has written the file's last block


def open_wandb(
    settings: WandbConfig, *, run_id: str, folder: Path, experiment: str, default_name: str, config: dict[str, Any]
) -> WandbSink | None:
    """A sink for this run; None where wandb is disabled or cannot start, after one warning.

    config: plain resolved containers. Online runs that cannot reach the service fall back to offline within
    `init_timeout_s`.
    """
    if settings.mode is WandbMode.disabled:
        return None
    try:
        import wandb
    except ImportError as error:
        print(f"warning: wandb cannot be imported ({error}); metrics.jsonl has everything", file=sys.stderr)
        return None
    name = shortened(settings.name or default_name, LONGEST_NAME, "name")
    tags = [shortened(tag, LONGEST_TAG, "tag") for tag in settings.tags]
    group = shortened(settings.group or experiment, LONGEST_NAME, "group")
    modes: list[Literal["online", "offline"]] = (
        ["online", "offline"] if settings.mode is WandbMode.online else ["offline"]
    )
    for mode in modes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = wandb.init(
                    mode=mode,
                    id=run_id,
                    resume="allow" if mode == "online" else None,  # offline it has no meaning: sync --append joins
                    dir=str(folder),
                    project=settings.project,
                    entity=settings.entity,
                    group=group,
                    name=name,
                    tags=tags,
                    job_type="train",
                    config=config,
                    settings=wandb.Settings(
                        silent=True, console="off", init_timeout=settings.init_timeout_s, x_disable_stats=True,
                        login_timeout=round(settings.init_timeout_s), disable_git=True, save_code=False,
                    ),
                )  # fmt: skip
            return WandbSink(run)
        except Exception as error:  # anything wandb raises must not end a training run; it is reported
            print(f"warning: wandb mode={mode} failed: {error!r}", file=sys.stderr, flush=True)
            wandb.teardown()  # its service would refuse the same run id to the next attempt
    print("warning: wandb is off for this run; metrics.jsonl has everything", file=sys.stderr, flush=True)
    return None
