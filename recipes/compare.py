"""What changed between runs: outcome and curves side by side, what differs, and where they part.

    python recipes/compare.py runs/EXPERIMENT/ID_A runs/EXPERIMENT/ID_B    table, differences, one HTML file, pictures
    python recipes/compare.py A/wandb/offline-run-... B                    from wandb's files where no more is left
    python recipes/compare.py GOOD BAD --bisect --incident                 replays from checkpoints; a started record
    python recipes/compare.py RUN --gate BASELINE                          for CI: exit code 1 where RUN is worse
    python recipes/compare.py --alerts RUN                                 what its alert rules say of it, step by step

See docs/comparing.md. The files are written under comparison/, or where --out says; no run's folder is changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.schema import AlertRule
from telemetry.alert_replay import replay_text
from telemetry.compare import differences, gate, page
from telemetry.compare.divergence import Tolerance, describe, divergence, event_line, events_before, tolerance_of
from telemetry.compare.figures import write_pictures
from telemetry.compare.incident import incident
from telemetry.compare.outcome import outcome_table
from telemetry.compare.runs import Run, load_runs
from telemetry.compare.wandb_runs import is_wandb

LONGEST = 150  # characters of a folder's name; file systems allow 255 bytes
EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL = 1, 2, 128  # and the signal's number
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal came: replays are ended and worktrees removed on the way out."""


def stop(number: int, frame: object) -> None:
    for one in SIGNALS:  # once is enough: the way out is not to be broken off
        signal.signal(one, signal.SIG_IGN)
    raise Stopped(number)


def main(words: Sequence[str]) -> int:
    asked = parser().parse_args(words)
    handlers = {one: signal.signal(one, stop) for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}
    try:
        refuse_strangers(asked)
        return run(asked)
    except Stopped as stopped:
        return EXIT_SIGNAL + int(stopped.args[0])
    except BrokenPipeError:  # whoever read our output has what it wanted (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return EXIT_REFUSED
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


def refuse_strangers(asked: argparse.Namespace) -> None:
    """Options that would be passed over without a word."""
    if asked.rules is not None and not asked.alerts:
        raise ValueError("--rules is for --alerts, which evaluates them over each RUN; name both")
    if asked.bisect_from is not None and not asked.bisect:
        raise ValueError("--bisect-from is for --bisect, which plays the runs again; name both")
    for one in ("gate", "alerts"):
        if getattr(asked, one):
            beside = [
                other for other in ("bisect", "incident", "alerts", "out") if getattr(asked, other) and other != one
            ]
            if beside:
                raise ValueError(
                    f"--{one} stands alone; leave out --{' and --'.join(beside)}, or call it again for these"
                )
    if asked.rules is not None and not asked.rules.is_file():
        raise ValueError(f"--rules {asked.rules}: there is no such file; name a YAML file as in conf/alerts/")


def run(asked: argparse.Namespace) -> int:
    if asked.gate is not None:
        return judged(asked)
    if asked.alerts:
        rules = rules_in(asked.rules) if asked.rules is not None else None
        for path in asked.runs:
            if is_wandb(path):
                raise ValueError(
                    f"{path} holds wandb's files; alert rules are evaluated over runs/EXPERIMENT/ID itself"
                )
        print(*(f"{replay_text(path, rules)}\n" for path in asked.runs), sep="\n", end="")
        return 0
    runs = load_runs(asked.runs)
    tolerance = tolerance_of(runs, loss=asked.loss_tolerance, norm=asked.norm_tolerance)
    print(outcome_table(runs))
    for one in runs:
        print(*(f"note: {one.name}: {note}\n" for note in one.notes), sep="", end="")
    found = differences.differences(runs)
    if len(runs) > 1:
        print(f"\n{differences.text(found, runs)}")
    for one in runs:
        print(*(f"{line}\n" for line in differences.changes_text(one)), sep="", end="")
    pairs = [page.Pair(0, place, divergence(runs[0], runs[place], tolerance)) for place in range(1, len(runs))]
    for pair in pairs:
        print(f"\n{parting(runs, pair)}")
    out = asked.out or Path("comparison") / folder_name([one.name for one in runs]) / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    extra, confirmed = [], None
    if asked.bisect:
        text, confirmed = bisected(asked, runs, pairs, tolerance)
        extra.append(("Replays", text))
    if asked.incident:
        extra.append(("Incident", recorded(runs, pairs, confirmed, unwritten(out.with_name("incident.md")))))
    page.write_page(page.Report(runs, tolerance, pairs, found, extra), out)
    marks = [runs[0].steps[pair.found.steps[0]]["step"] for pair in pairs if pair.found.steps is not None]
    pictures = write_pictures(runs, out.parent, parts_at=min(marks, default=None))
    print(f"\nreport   {out}")
    print(*(f"picture  {path}\n" for path in pictures), sep="", end="")
    return 0


def rules_in(file: Path) -> dict[str, AlertRule]:
    """Of a YAML file as in conf/alerts/."""
    from yaml import YAMLError, safe_load

    from conf import alert_rules

    try:
        given = safe_load(file.read_text())
    except YAMLError as error:
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{file} holds no rules; write NAME: {{metric: ..., owner: ..., mitigation: ...}}")
    rules, problems = alert_rules.typed(given)
    if problems := [*problems, *alert_rules.problems(rules)]:
        raise ValueError("\n".join(problems))
    return rules


def folder_name(names: Sequence[str]) -> str:
    """The runs' names where a folder's name can hold them."""
    plain = ["".join("_" if letter in " /\\()" else letter for letter in name).rstrip("_") for name in names]
    whole = "+".join(plain)
    return whole if len(whole) <= LONGEST else f"{plain[0][:LONGEST]}+{len(names) - 1}_more"


def bisected(
    asked: argparse.Namespace, runs: Sequence[Run], pairs: Sequence[page.Pair], tolerance: Tolerance
) -> tuple[str, str | None]:
    """What the replays of the first and the last run showed, and the cause that they confirm."""
    from engine.bisect import bisect
    from engine.replay import Player

    if not pairs:
        raise ValueError("--bisect compares two runs; name a good one before the bad one")
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder, Player(Path(folder), asked.bisect_timeout) as play:
        found = bisect(
            runs[0], runs[-1], pairs[-1].found, tolerance, play, most_steps=asked.bisect_steps, begin=asked.bisect_from,
            say=lambda line: print(line, flush=True),
        )  # fmt: skip
        text = "\n".join([found.text(), *play.notes])
    print(f"\n{text}")
    return text, found.confirmed


def recorded(runs: Sequence[Run], pairs: Sequence[page.Pair], confirmed: str | None, path: Path) -> str:
    """The started record of the last run, against the first; printed and kept beside the report."""
    good, found = (runs[0], pairs[-1].found) if pairs else (None, None)
    text = incident(good, runs[-1], found, confirmed=confirmed)
    path.write_text(text)
    print(f"\n{text}\nrecord   {path}")
    return text


def unwritten(path: Path) -> Path:
    """incident.md, or incident-2.md ...: a record is gone on with by a person, and is never written over."""
    taken = (path.with_stem(f"{path.stem}-{number}") for number in range(2, sys.maxsize))
    return next(one for one in chain([path], taken) if not one.exists())


def parting(runs: Sequence[Run], pair: page.Pair) -> str:
    """Where a run leaves the first, and the events before it on both timelines."""
    both = (runs[pair.first], runs[pair.second])
    lines = [describe(pair.found, [one.name for one in both])]
    for one, step in zip(both, pair.found.steps or (), strict=False):
        events = [f"  {event_line(event)}" for event in events_before(one, step)]
        lines += [f"before it in {one.name}:", *(events or ["  nothing on its timeline"])]
    return "\n".join(lines)


def judged(asked: argparse.Namespace) -> int:
    """Each run against the baseline; 1 where one fails."""
    *runs, baseline = load_runs([*asked.runs, asked.gate])
    code = 0
    for one in runs:
        tolerance = tolerance_of([one, baseline], loss=asked.loss_tolerance, norm=asked.norm_tolerance)
        limits = gate.Limits(
            tolerance, steps=asked.parity_steps, memory=asked.memory_tolerance,
            utilisation=asked.utilisation_tolerance, communication=asked.communication_tolerance,
        )  # fmt: skip
        verdict = gate.judge(one, baseline, limits)
        print(verdict.text(one, baseline))
        code = EXIT_FAILED if verdict.failures else code
    return code


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give 0 or more (0.05 is five percent)")
    return value


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps; give 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or wandb's offline-run-*")
    found.add_argument("--out", type=Path, metavar="FILE.html", help="the report (comparison/<ids>/report.html)")
    found.add_argument("--loss-tolerance", type=share, metavar="SHARE", help="of a loss, relative (by number format)")
    found.add_argument("--norm-tolerance", type=share, metavar="SHARE", help="of a gradient norm, relative (likewise)")
    found.add_argument("--alerts", action="store_true", help="evaluate each RUN's alert rules again, and stop")
    found.add_argument("--rules", type=Path, metavar="FILE.yaml", help="for --alerts, in place of the run's own rules")
    found.add_argument("--incident", action="store_true", help="start a record of what went wrong in the last RUN")
    playing = found.add_argument_group("replays")
    playing.add_argument("--bisect", action="store_true", help="play the first and the last RUN again where they part")
    playing.add_argument("--bisect-steps", type=count, default=200, help="most steps of a replay (%(default)s)")
    playing.add_argument(
        "--bisect-from", type=count, metavar="STEP", help="begin at checkpoints of this step or earlier (the nearest)"
    )
    playing.add_argument(
        "--bisect-timeout", type=share, default=1800.0, metavar="S", help="longest replay, in seconds (%(default)s)"
    )
    judging = found.add_argument_group("gate")
    judging.add_argument("--gate", type=Path, metavar="BASELINE", help="judge each RUN against this one")
    defaults = gate.Limits(Tolerance((0, 0), (0, 0)))
    judging.add_argument("--parity-steps", type=count, default=defaults.steps, help="steps compared (%(default)s)")
    default_of = {"memory": f"{gate.MEMORY}; on CPUs {gate.MEMORY_ON_CPU}"}
    for name, what in (
        ("memory", "peak memory above the baseline's"),
        ("utilisation", "utilisation below the baseline's"),
        ("communication", "seconds of collectives above the baseline's"),
    ):
        judging.add_argument(
            f"--{name}-tolerance", type=share, default=getattr(defaults, name), metavar="SHARE",
            help=f"{what} ({default_of.get(name, '%(default)s')})",
        )  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
