"""The page that --help prints: how to call, the groups and their options, and every knob with its sentence."""

from __future__ import annotations

import os
import textwrap

from conf.knobs import CONF, knobs, options

INTRODUCTION = """\
{script}: options are Hydra's, key=value; group=option picks a YAML file of conf/.

    deepspeed --num_gpus 8 {script} model=llama_8b parallel=tp4_pp2 zero=stage1 train.lr=3e-4
    {launcher} -n 4 {script} experiment=stdlib_tp2_pp2
    python {script} model=llama_tiny                       one rank

Flags: --cfg job (the composed config), --info, -m (one run for each choice of key=a,b), --config-dir DIR (more YAML),
--shell-completion install=bash, --hydra-help (the rest).

Groups (group=option)
"""


def page(script: str) -> str:
    """The whole text; `script` as it was called."""
    launcher = os.path.relpath(CONF.parent / "launch" / "local.sh")
    lines = [INTRODUCTION.format(script=script, launcher=launcher)]
    for group, names in options().items():
        lines.append(textwrap.fill(", ".join(names), 116, initial_indent=f"  {group:<12} ", subsequent_indent=" " * 15))
    lines.append("\nKnobs (key = default: sentence)")
    section = ""
    for knob in knobs():
        if knob.key.rpartition(".")[0] != section:
            section = knob.key.rpartition(".")[0]
            lines.append("")
        lines.append(f"  {f'{knob.key} = {knob.default}':<46} {knob.sentence}".rstrip())
    return "\n".join(lines) + "\n"
