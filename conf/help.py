"""The page that --help prints: how to call, the groups and their options, and every knob with its sentence."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from conf.knobs import CONF, knobs, options, rule_knobs

INTRODUCTION = """\
{script}: options are Hydra's, key=value; group=option picks a YAML file of conf/.

{examples}

Flags: --cfg job (the composed config), --info, -m (one run for each choice of key=a,b), --config-dir DIR (more YAML),
--shell-completion install=bash, --hydra-help (the rest).

Groups (group=option)
"""

ON_RANKS = """\
deepspeed --num_gpus 8 {script} model=llama_8b parallel=tp4_pp2 zero=stage1 train.lr=3e-4
{launcher} -n 4 {script} experiment=stdlib_tp2_pp2
python {script} model=llama_tiny                       one rank"""
ITS_OWN = {  # recipes whose calls are not a training's
    "evaluate.py": """\
deepspeed --num_gpus 4 {script} initialize_from=runs/EXPERIMENT/ID parallel=tp2_pp2
python {script} initialize_from=FOLDER evaluate.wikitext=[wiki.test.tokens] evaluate.lambada=[test.jsonl]""",
    "plan.py": "python {script} model=llama_70b cluster=dgx_h100 cluster.nodes=8 train.global_batch_size=1024",
    "promote.py": "python {script} profile=tp2_pp2 model=llama_tiny promote.dry_run=true",
    "generate.py": 'python {script} initialize_from=RUN prompt="def main(" generate.temperature=0.8',
    "benchmark.py": "python {script} benchmark.plans=[tp2,pp2]",
}


def page(script: str) -> str:
    """The whole text; `script` as it was called."""
    launcher = os.path.relpath(CONF.parent / "launch" / "local.sh")
    examples = ITS_OWN.get(Path(script).name, ON_RANKS).format(script=script, launcher=launcher)
    lines = [INTRODUCTION.format(script=script, examples=textwrap.indent(examples, " " * 4))]
    for group, names in options().items():
        lines.append(textwrap.fill(", ".join(names), 116, initial_indent=f"  {group:<12} ", subsequent_indent=" " * 15))
    lines.append("\nKnobs (key = default: sentence)")
    section = ""
    for knob in (*knobs(), *rule_knobs()):
        if knob.key.rpartition(".")[0] != section:
            section = knob.key.rpartition(".")[0]
            lines.append("")
        lines.append(f"  {f'{knob.key} = {knob.default}':<46} {knob.sentence}".rstrip())
    return "\n".join(lines) + "\n"
