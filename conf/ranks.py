"""How many ranks a command line needs on this machine, and whether it can run on them: for launch/local.sh, before
anything starts.

    python -m conf.ranks pretrain.py "" experiment=stdlib_tp2_pp2       prints: 4
    python -m conf.ranks pretrain.py 4 experiment=stdlib_tp2_pp2        checks that they are 4

On CPU that is tp x pp. On GPUs it is the most data-parallel copies of the model that fit on them and divide the batch.
Where GPUs are fewer than tp x pp and the command line names no plan itself, the plan shrinks to what they allow: the
override that does so is printed behind the number (`2 parallel=tp2`), and why on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf import cli
from conf.cli import NO_SOURCE, compose_config, parse_flags, without_launcher_arguments
from conf.load import ConfigError, range_problems
from conf.schema import Config
from conf.weight_sources import with_source
from parallel import rules
from parallel.forward_only import forward_only
from parallel.hardware import device_count, device_kind

SMALLER_PLANS = ("tp2", "tp1")  # tried in this order
TRAINING = ("pretrain.py", "finetune.py")
FORWARD_ONLY = ("evaluate.py", "generate.py")


def choose(
    arguments: Sequence[str], *, device: str, devices: int, config_dir: str | None = None
) -> tuple[int, list[str]]:
    """Number of ranks, and overrides to add. Raises ConfigError where no number of ranks fits."""
    config = _in_range(arguments, config_dir)
    needed = config.parallel.tp * config.parallel.pp
    if device == "cpu":
        return needed, []
    if needed <= devices:
        return _most(config, devices, device), []
    if not any(word.lstrip("+").startswith("parallel") for word in arguments):
        for plan in SMALLER_PLANS:
            smaller = compose_config([*arguments, f"parallel={plan}"], config_dir=config_dir)
            if smaller.parallel.tp <= devices:
                return _most(smaller, devices, device), [f"parallel={plan}"]
    raise ConfigError([
        f"parallel.tp={config.parallel.tp} x parallel.pp={config.parallel.pp} = {needed} ranks but this machine has "
        f"{devices} GPUs; use a smaller plan, or DS_ACCELERATOR=cpu"
    ])  # fmt: skip


def _most(config: Config, devices: int, device: str) -> int:
    """The largest world that fits on the devices and has a valid plan; one copy where none has, for its messages."""
    needed = config.parallel.tp * config.parallel.pp
    for copies in range(devices // needed, 0, -1):
        if not rules.problems(config, world_size=copies * needed, device=device):
            return copies * needed
    return needed


def composed(recipe: str, arguments: Sequence[str], *, config_dir: str | None = None) -> Config:
    """The configuration that a recipe makes of these words, every knob within its range. Raises ConfigError."""
    if recipe in FORWARD_ONLY:
        arguments = with_source(arguments, device=device_kind)
    config = _in_range(arguments, config_dir)
    if recipe in FORWARD_ONLY and not config.initialize_from:
        raise ConfigError([NO_SOURCE])
    return config


def _in_range(arguments: Sequence[str], config_dir: str | None) -> Config:
    config = compose_config(arguments, config_dir=config_dir)
    problems = range_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def require_plan(recipe: str, config: Config, *, world_size: int, device: str | None) -> None:
    """ConfigError where the plan cannot be on so many ranks; recipes that run no plan decide for themselves."""
    if recipe in FORWARD_ONLY:
        config = forward_only(config, world_size=world_size)
    if recipe in (*TRAINING, *FORWARD_ONLY):
        cli.require_plan(config, world_size=world_size, device=device)


def main() -> int:
    recipe, number, *words = sys.argv[1:]
    device = device_kind()
    added: list[str] = []
    try:
        flags = parse_flags(without_launcher_arguments(words))
        if not number:
            ranks, added = choose(flags.overrides, device=device, devices=device_count(), config_dir=flags.config_dir)
        else:
            ranks = int(number)
        if not (flags.help or flags.hydra_help or flags.cfg or flags.info or flags.multirun):  # which start no run
            config = composed(recipe, [*flags.overrides, *added], config_dir=flags.config_dir)
            require_plan(recipe, config, world_size=ranks, device=device)
    except ConfigError as error:
        print("\n".join(f"error: {line}" for line in error.problems), file=sys.stderr)
        return 2
    if added:
        print(f"this machine's GPUs do not hold the configured plan; running with {' '.join(added)}", file=sys.stderr)
    print(ranks, *added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
