"""A sweep whose jobs Optuna draws from the results so far: `hydra/sweeper=optuna`, Hydra's plugin.

Hydra runs the sweeper as in any app under -m. What the sweeper hands its batches to is a launcher plugin of ours, which
gives them to a function: that runs each job as a process and gives back what it reached. Not here: running them.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf.errors import OmegaConfBaseException

from conf import overrides as checks
from conf.cli import folders_of, register
from conf.knobs import CONF
from conf.load import ConfigError
from conf.model_folders import names_folders

SWEEPER = "hydra/sweeper="
RESULTS = "optimization_results.yaml"  # what the plugin writes in the end
INSTALL = "pip install hydra-optuna-sweeper==1.3.0 'optuna>=2.10,<3'"
# What the sweep's folder and its own launching take the place of.
NOT_OFFERED = ("hydra/launcher", "hydra.launcher", "hydra.sweep.", "hydra.sweeper.storage", "hydra.sweeper.study_name")

Objectives = Sequence[float] | str  # of one job; a string says why there are none
Launch = Callable[[Sequence[Sequence[str]], int], Sequence[Objectives]]  # a batch, the number of its first job


class NoObjectiveError(Exception):
    """Of a job that failed, in one line."""


class Processes(Launcher):
    """Hydra's interface of a launcher, in front of a function."""

    launch_batch: Launch

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launch_batch = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        found = self.launch_batch(job_overrides, initial_job_idx)
        return [_as_return(words, one) for words, one in zip(job_overrides, found, strict=True)]


def _as_return(words: Sequence[str], found: Objectives) -> JobReturn:
    if isinstance(found, str):
        return JobReturn(overrides=list(words), status=JobStatus.FAILED, _return_value=NoObjectiveError(found))
    value = found[0] if len(found) == 1 else list(found)
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED, _return_value=value)


def is_search(overrides: Sequence[str]) -> bool:
    """Whether a sweeper is named. Raises ConfigError for one that is not offered, or not installed."""
    named = [word for word in overrides if word.startswith(SWEEPER)]
    if not named or named[-1] == f"{SWEEPER}basic":
        return False
    if named[-1] != f"{SWEEPER}optuna":
        raise ConfigError([f"{named[-1]} is not offered; use {SWEEPER}optuna, or none for all combinations"])
    try:
        version("hydra-optuna-sweeper")
    except PackageNotFoundError:
        raise ConfigError([f"{named[-1]} is a plugin that is not installed here; {INSTALL}"]) from None
    problems = [f"{word}: a sweep has its own; leave it out" for word in overrides if word.startswith(NOT_OFFERED)]
    if problems:
        raise ConfigError(problems)
    return True


def search(
    overrides: Sequence[str], launch: Launch, *, seed: str, at_once: int, folder: Path, config_dir: str | None = None
) -> None:
    """Let the sweeper draw its number of jobs. Raises ConfigError for overrides that it does not take.

    at_once: jobs that it draws without waiting for each other's results. folder: where it writes RESULTS. What is drawn
    follows from the results and from `seed`, so that the same sweep draws the same again. A failed job stops nothing.
    These are defaults: overrides of the sweeper win.
    """
    import optuna  # not needed by other sweeps

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    defaults = [f"hydra.sweeper.n_jobs={at_once}", "hydra.sweeper.max_failure_rate=1.0"]
    if "hydra/sweeper/sampler=grid" not in overrides:  # it has no seed
        defaults.append(f"hydra.sweeper.sampler.seed={zlib.crc32(seed.encode())}")
    models = [text for text in overrides if names_folders(text)]  # which Hydra does not know, and every job gets
    others = [text for text in overrides if text not in models]
    words = ["hydra/launcher=processes", f"hydra.sweep.dir='{folder}'", *defaults, *checks.opened(others)]

    def launch_all(batch: Sequence[Sequence[str]], first: int) -> Sequence[Objectives]:
        return launch([[*models, *job] for job in batch], first)

    if config_dir is not None:
        words.append(f"hydra.searchpath=[file://{folders_of(config_dir)[-1]}]")
    register()
    _offer(Processes)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            app = GlobalHydra.instance().hydra
            assert app is not None
        app.multirun("config", launch_all, words, with_log_configuration=False)  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([checks.explain(error)]) from None
    except NoObjectiveError:  # more failed than hydra.sweeper.max_failure_rate: the sweeper draws no more
        return
    except ValueError as error:
        if str(error) != "No trials are completed yet.":  # Optuna, asked for the best of no finished job
            raise


def _offer(launcher: type[Launcher]) -> None:
    """Make it known as hydra/launcher=processes. Hydra takes plugins from a package of one name alone."""
    launcher.__module__ = "hydra_plugins.processes"
    sys.modules[launcher.__module__] = sys.modules[__name__]
    Plugins.instance().register(launcher)
    node = {"_target_": f"{launcher.__module__}.{launcher.__qualname__}"}
    ConfigStore.instance().store("processes", node, group="hydra/launcher")
