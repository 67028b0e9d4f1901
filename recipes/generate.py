"""Continue texts and answer messages with the weights of a run, a checkpoint or a folder of transformers.

    python recipes/generate.py initialize_from=runs/stdlib_tp2_pp2/ID prompt="def main("
    launch/local.sh -n 4 recipes/generate.py initialize_from=FOLDER parallel=tp2_pp2 generate.prompts_file=asked.jsonl \
        generate.output=answered.jsonl generate.stream=false
    deepspeed --num_gpus 8 recipes/generate.py initialize_from=FOLDER parallel.tp=8 generate.chat=true \
        generate.temperature=0.7 generate.top_p=0.9 prompt="Why is the sky blue?"

Model, number format, tokenizer and adapters are those of the weights; parallel.tp and parallel.pp split them as in
training, and the other ranks are replicas that share the prompts. prompt="..." is taken as it is typed. The text goes
to standard output, all else to standard error. Every knob: docs/generation.md.
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def run(config: Config, plan: ParallelPlan) -> int:
    """Config and plan are valid here; torch is imported from here on."""
    from engine.answer_sinks import JsonLines, Terminal
    from engine.answers import answers, generator_of, open_job
    from engine.device import this_device
    from engine.distributed import broadcast, start, stop
    from engine.failure import refuse
    from engine.inference import InferenceModel
    from parallel.groups import open_groups

    settings, first = config.generate, os.environ.get("RANK", "0") == "0"
    try:
        found = open_job(config) if first else None
    except (ValueError, OSError) as error:
        return refuse(error)
    device = this_device()
    start(device, timeout_s=config.cluster.timeout_s)
    job, groups = broadcast(found), open_groups(plan)
    try:
        model = InferenceModel(config, plan, groups, device=device.torch_device, source=job.source)
        generator = generator_of(model, job, settings)
        say(first, f"model    {config.model.name}: {model.about}, from {job.source.path}")
        terminal = Terminal(
            job.prompts, num_samples=settings.num_samples, chat=settings.chat, stream=settings.stream, out=sys.stdout
        )
        began, tokens, count = time.perf_counter(), 0, 0
        see = terminal.see if first else (lambda number, text, ended: None)
        with JsonLines(settings.output if first else None, job.prompts) as file:
            for done in answers(generator, job, groups, settings, see=see):
                if first:
                    terminal.show(done)
                    file.write(done)
                tokens, count = tokens + sum(len(answer.ids) for answer in done), count + len(done)
        seconds = time.perf_counter() - began
        say(first, f"speed    {tokens:,} tokens in {count} answers, {seconds:.2f} s: {tokens / seconds:,.1f} tokens/s")
    except ValueError as error:
        return refuse(error)
    stop()
    return 0


def say(first: bool, line: str) -> None:
    """About the answers: not on standard output."""
    if first:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows another
    main(run, trains=False)
