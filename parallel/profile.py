"""A plan as a versioned profile: conf/parallel/NAME.yaml, and beside it the record records/NAME.json.

The YAML holds what splits a model (degrees, axis order, schedule, split, recomputation); the record holds what was
predicted of it, by which planner, and what was observed since. A profile is known by name, version and the hash of what
its YAML determines. The format is here, and reading and writing it; what an observation must show is
`parallel.promotion`, what is measured comes from `engine`.

    python -m parallel.profile COMMIT        predicts every record of conf/parallel again; COMMIT: of this code
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from conf.schema import Config, ParallelConfig
from parallel.plan import ParallelPlan
from parallel.prediction import PLANNER_VERSION, Prediction, predict_run
from parallel.record import conditions, config_of, plain, predicted, software

PREDICTED_ONLY = "predicted only"
LABELS = ("name", "version")  # of a profile: they split nothing
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True)
class Profile:
    """Which profile a run is split by; the hash tells it from one whose knobs were changed on the command line."""

    name: str
    version: int
    hash: str

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Profile:
        return cls(parallel.name, parallel.version, profile_hash(parallel))


def determined(parallel: ParallelConfig) -> dict[str, Any]:
    """The knobs that differ from the schema's defaults, so that a knob added later changes no profile."""
    defaults = plain(ParallelConfig())
    return {k: v for k, v in plain(parallel).items() if k not in LABELS and v != defaults[k]}


def profile_hash(parallel: ParallelConfig) -> str:
    """sha256 of what the YAML determines: its values, not its comments nor its labels."""
    return sha256(json.dumps(determined(parallel), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def new_record(
    config: Config, plan: ParallelPlan, prediction: Prediction | None, *, device: str, git_commit: str | None
) -> dict[str, Any]:
    """The record of `config.parallel` as it stands: predicted, not observed."""
    return {
        "profile": plain(Profile.of(config.parallel)) | {"determined": determined(config.parallel)},
        "status": PREDICTED_ONLY,
        "planner": {
            "version": PLANNER_VERSION,
            "git_commit": git_commit,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "software": software(),
        },
        "conditions": conditions(config, world_size=plan.world_size),
        "parallel": plain(config.parallel),
        "cluster": plain(config.cluster),
        "predicted": predicted(config, plan, prediction, device=device),
        "replaces": None,
        "observations": [],
    }


def renewed(record: Mapping[str, Any], *, git_commit: str | None) -> dict[str, Any]:
    """The same record as this planner predicts it; what was observed stays."""
    config, device = config_of(record), record["predicted"]["device"]
    plan = ParallelPlan.from_config(config, record["conditions"]["cluster"]["ranks"], device=device)
    whole = prediction_or_none(config, plan, device=device)
    kept = {name: record[name] for name in ("status", "replaces", "observations")}
    return new_record(config, plan, whole, device=device, git_commit=git_commit) | kept


def prediction_or_none(config: Config, plan: ParallelPlan, *, device: str) -> Prediction | None:
    """None where the cluster has no measured links and rates: a record then has bytes alone."""
    try:
        return predict_run(config, plan, device=device)
    except ValueError:
        return None


def write_profile(
    name: str,
    config: Config,
    prediction: Prediction | ParallelPlan,
    folder: Path,
    *,
    overwrite: bool = False,
    device: str = "cuda",
    git_commit: str | None = None,
    about: str = "",
) -> Path:
    """Write folder/NAME.yaml and its record; the YAML's path.

    prediction: a plan alone where the cluster has no measured links and rates: the record then has bytes and no
    seconds. An existing name is written again, as the next version, only where `overwrite` says so; the observations
    under the version before stay in the new record as what it replaces. Raises ValueError for a name that cannot be.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"profile name {name!r} cannot be; use a letter, then letters, digits and _")
    path, before = folder / f"{name}.yaml", read_record(name, folder)
    if (path.exists() or before) and not overwrite:
        held = f"version {before['profile']['version']}" if before else "without a record"
        raise ValueError(f"{path} exists ({held}); plan.overwrite=true makes the next version, or use another name")
    plan, whole = (prediction, None) if isinstance(prediction, ParallelPlan) else (prediction.plan, prediction)
    parallel = replace(
        config.parallel,
        name=name,
        version=1 + before["profile"]["version"] if before else 1,
        stages=plan.blocks_per_stage if plan.pipeline_model_parallel_size > 1 else None,
    )
    pinned = replace(config, parallel=parallel)
    record = new_record(pinned, plan, whole, device=device, git_commit=git_commit)
    if before:
        record["replaces"] = {"profile": before["profile"], "observations": before["observations"]}
    about = about or f"{config.model.name} on {plan.world_size} devices of {config.cluster.name}"
    comment = f"{about}, with {_beside(config)}.\n# Standing: see records/{name}.json."
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(profile_yaml(parallel, comment=comment))
    write_record(name, folder, record)
    return path


def _beside(config: Config) -> str:
    """The knobs that the prediction hangs on and a profile does not hold."""
    train, data = config.train, config.data
    return (
        f"zero=stage{config.zero.stage} precision={config.precision.dtype.value} data.sequence_length="
        f"{data.sequence_length}\n# train.micro_batch_size={train.micro_batch_size} "
        f"train.global_batch_size={train.global_batch_size}"
    )


def profile_yaml(parallel: ParallelConfig, *, comment: str) -> str:
    lines = [f"# {comment}"]
    return "\n".join([*lines, *(f"{key}: {_yaml(value)}" for key, value in plain(parallel).items())]) + "\n"


def _yaml(value: Any) -> str:
    """JSON, which YAML reads; words without quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value)


def record_path(name: str, folder: Path) -> Path:
    return folder / "records" / f"{name}.json"


def read_record(name: str, folder: Path) -> dict[str, Any] | None:
    """None where there is none. Raises ValueError where it is no record."""
    path = record_path(name, folder)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        if not {"profile", "conditions", "predicted", "observations"} <= set(record):
            raise ValueError("a part of it is missing")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a profile's record ({error}); write it again with recipes/plan.py") from None
    return record


def write_record(name: str, folder: Path, record: Mapping[str, Any]) -> None:
    """Through a temporary name, so that a reader never sees half a record."""
    path = record_path(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, path)


def main(folder: Path, git_commit: str | None) -> None:
    """Every record as this planner predicts it."""
    for path in sorted((folder / "records").glob("*.json")):
        record = read_record(path.stem, folder)
        assert record is not None
        write_record(path.stem, folder, renewed(record, git_commit=git_commit))
        print(path)


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1] / "conf" / "parallel", sys.argv[1] if len(sys.argv) > 1 else None)
