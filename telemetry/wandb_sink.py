"""Weights & Biases on rank 0. The only home of wandb: without it, or without its service, training goes on.

Names and x-axes are the same for every plan, so that runs compare out of the box: over step (the default), or over
tokens, flops or hours, which every row has. Offline runs hold the same; `wandb sync` sends them.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from conf.schema import WandbConfig, WandbMode
from telemetry.redact import redacted
from telemetry.report import AXES, EvaluationReport, StepReport, as_metrics
from telemetry.wandb_files import is_finished

LONGEST_TAG = 64  # characters; wandb refuses longer ones
LONGEST_NAME = 128  # characters; the service refuses longer ones when an offline run is synced
SUMMARIES = {  # what stands of a metric in the table of runs; of all others the last value
    "train/loss": "min,last",
    "validation/loss": "min,last",
    "train/tokens_per_s": "max,last",
    "train/mfu": "max,last",
    "train/mfu_of_measured_rate": "max,last",
}


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
        for axis in AXES:
            run.define_metric(axis)
        run.define_metric("*", step_metric="step")
        for name, summary in SUMMARIES.items():
            run.define_metric(name, step_metric="step", summary=summary)

    def write(self, report: StepReport | EvaluationReport) -> None:
        self.run.log(as_metrics(report))

    def write_scores(self, scores: Mapping[str, float], *, step: int) -> None:
        """Numbers of an evaluation; step: of the training that made the weights."""
        self.run.log({"step": step, **scores})

    def write_image(self, name: str, path: Path) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(path))})

    def write_checkpoint(self, path: Path, about: Mapping[str, Any]) -> None:
        """An artifact that says where it is: no byte of it is read or sent. about["step"] becomes an alias."""
        import wandb

        name = re.sub(r"[^\w.-]", "-", f"{self.run.id}-checkpoint")[-LONGEST_NAME:]
        artifact = wandb.Artifact(name, type="checkpoint", metadata=dict(about))
        artifact.add_reference(path.as_uri(), name=path.name, checksum=False)
        self.run.log_artifact(artifact, aliases=[f"step-{about['step']}"])

    def alert(self, title: str, text: str, level: str) -> None:
        """To whoever the project's settings say (mail, Slack). Offline runs keep it until they are synced."""
        levels = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
        try:  # 0 would mean wandb's minute between alerts
            title, text = redacted((title, text))
            self.run.alert(title=title[:63], text=text, level=levels[level], wait_duration=0.001)
        except Exception as error:  # anything wandb raises must not end a training run, nor the metrics it still takes
            if not self.alerts_fail:
                print(f"warning: wandb alerts fail, metrics go on: {error!r}", file=sys.stderr, flush=True)
            self.alerts_fail = True

    def close(self, *, failed: bool, summary: dict[str, Any]) -> None:
        self.run.summary.update(redacted(summary))
        self.run.finish(exit_code=1 if failed else 0)
        import wandb

        wandb.teardown()  # finish returns before the service has written the file's last block
        if self.run.offline and not all(map(is_finished, Path(self.run.dir).parent.glob("*.wandb"))):
            lost = "wandb's file lacks the end of the run (disk full?), which its service did not tell"
            print(f"warning: {lost}; metrics.jsonl has everything", file=sys.stderr, flush=True)


def open_wandb(
    settings: WandbConfig,
    *,
    run_id: str,
    folder: Path,
    experiment: str,
    default_name: str,
    config: dict[str, Any],
    tags: Sequence[str] = (),
) -> WandbSink | None:
    """A sink for this run; None where wandb is disabled or cannot start, after one warning.

    config: plain resolved containers; tags: beside the user's. Online runs that cannot reach the service
    fall back to offline within `init_timeout_s`.
    """
    if settings.mode is WandbMode.disabled:
        return None
    try:
        import wandb
    except ImportError as error:
        print(f"warning: wandb cannot be imported ({error}); metrics.jsonl has everything", file=sys.stderr)
        return None
    names = redacted({"name": settings.name or default_name, "group": settings.group or experiment})
    shown: dict[str, Any] = {what: shortened(text, LONGEST_NAME, what) for what, text in names.items()}
    shown["job_type"] = redacted(settings.job_type or Path(sys.argv[0]).stem)
    shown["tags"] = list(
        dict.fromkeys(shortened(tag, LONGEST_TAG, "tag") for tag in redacted((*tags, *settings.tags)))
    )  # fmt: skip
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
                    config=config,
                    **shown,
                    settings=wandb.Settings(
                        silent=True, console="off", init_timeout=settings.init_timeout_s, x_disable_stats=True,
                        login_timeout=round(settings.init_timeout_s), disable_git=True, save_code=False,
                        x_disable_meta=True,  # the command line, as typed: run.json has it without secrets
                    ),
                )  # fmt: skip
            return WandbSink(run)
        except Exception as error:  # anything wandb raises must not end a training run; it is reported
            print(f"warning: wandb mode={mode} failed: {error!r}", file=sys.stderr, flush=True)
            wandb.teardown()  # its service would refuse the same run id to the next attempt
    print("warning: wandb is off for this run; metrics.jsonl has everything", file=sys.stderr, flush=True)
    return None
