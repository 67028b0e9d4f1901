"""From and to Hugging Face: weights both ways, and models from their config.json.

    python recipes/convert.py import FOLDER_OR_NAME [OUT]        transformers' weights -> a folder to train from
    python recipes/convert.py export CHECKPOINT_OR_RUN OUT       a checkpoint -> a folder that from_pretrained loads
    python recipes/convert.py config FOLDER_OR_CONFIG_JSON NAME  a config.json -> conf/model/NAME.yaml, for model=NAME
    python recipes/convert.py adapter CHECKPOINT_OR_RUN OUT      LoRA's adapters -> a folder that PEFT loads
    python recipes/convert.py merge CHECKPOINT_OR_RUN OUT        the same added to the weights that they stand beside

Training may also start from a transformers folder as it is: pretrain.py model=FOLDER initialize_from=FOLDER.
Families, and what is refused: docs/huggingface.md. What cannot be is refused by name with exit code 2, and no folder is
left half written.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf import interrupts
from conf.huggingface import model_of, read_config
from conf.knobs import CONF
from conf.model_folders import model_yaml
from conf.schema import Objective
from parallel.objectives import objective_of
from parallel.sizes import parameter_count
from telemetry.tables import size

EXIT_REFUSED, EXIT_SIGNAL = 2, 128
AUTO_CLASSES = {Objective.clm: "AutoModelForCausalLM", Objective.mlm: "AutoModelForMaskedLM"}  # of transformers


class Stopped(BaseException):
    """SIGTERM came: what is half written is removed on the way out."""


def stop(number: int, frame: object) -> None:
    raise Stopped(number)


def main(words: Sequence[str]) -> int:
    interrupts.as_usual()
    asked = parser().parse_args(words)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        asked.run(asked)
        return 0
    except Stopped as stopped:
        return EXIT_SIGNAL + int(stopped.args[0])
    except KeyboardInterrupt:
        interrupts.tell()
        return EXIT_SIGNAL + signal.SIGINT
    except (ValueError, OSError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return EXIT_REFUSED
    finally:
        signal.signal(signal.SIGTERM, before)


def say(line: str) -> None:
    print(line, flush=True)


def import_(asked: argparse.Namespace) -> None:
    from engine.weights_import import import_weights, source_folder

    source = source_folder(asked.source)
    out = asked.out if asked.out is not None else Path(f"{source.name}-imported")
    done = import_weights(source, out, ignored=asked.ignore, say=say)
    say(
        f"imported  {source}: {done.model.family.value}, {parameter_count(done.model):,} parameters in {done.tensors} "
        f"tensors of {', '.join(done.dtypes)}"
    )
    if done.aside:
        shown = f"{', '.join(done.aside[:4])}{' ...' if len(done.aside) > 4 else ''}"
        say(f"left out  {shown} (copies, buffers, or parts for other tasks)")
    tokenizer = f" data.tokenizer={out}/weights" if done.has_tokenizer else ""
    objective = " objective=mlm" if objective_of(done.model.family) is Objective.mlm else ""
    say(f"train     python recipes/pretrain.py model={at(out)} initialize_from={out}{tokenizer}{objective}")


def export(asked: argparse.Namespace) -> None:
    from engine.weights_export import export_weights, open_stored

    stored = open_stored(asked.source)
    done = export_weights(
        stored, asked.out, dtype=asked.dtype, max_bytes=asked.max_shard_size, tokenizer=asked.tokenizer, say=say
    )
    model = stored.config.model
    tied = ", head tied to the embedding" if model.tie_word_embeddings else ""
    say(
        f"exported  {stored.path}: {model.family.value}, {parameter_count(model):,} parameters in {done.tensors} "
        f"tensors of {', '.join(done.dtypes)}, {size(done.bytes)}{tied}"
    )
    for note in done.notes:
        say(f"note      {note}")
    loads = " and AutoTokenizer" if done.has_tokenizer else ""
    say(f"load      {AUTO_CLASSES[objective_of(model.family)]}{loads}.from_pretrained({str(asked.out)!r})")


def config(asked: argparse.Namespace) -> None:
    if not re.fullmatch(r"[A-Za-z]\w*", asked.name):
        raise ValueError(f"NAME={asked.name} cannot be; use a letter, then letters, digits and _")
    model = model_of(read_config(asked.source), name=asked.name, ignored=asked.ignore)
    path = asked.out if asked.out is not None else CONF / "model" / f"{asked.name}.yaml"
    if path.exists() and not asked.overwrite:
        raise ValueError(f"{path} exists; choose another name, or --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)
    count = f"{parameter_count(model):,}".replace(",", " ")
    path.write_text(model_yaml(model, comment=f"{asked.source}: {count} parameters."))
    say(f"wrote     {path}")
    say(f"use       model={asked.name}" if asked.out is None else f"use       --config-dir and model={asked.name}")


def adapter(asked: argparse.Namespace) -> None:
    from engine.peft_files import checkpoint_of, export_adapter

    source = checkpoint_of(asked.source)
    about = export_adapter(source, asked.out)
    say(f"exported  {source}: LoRA of rank {about['r']} for {', '.join(about['target_modules'])}")
    say(f"load      peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), {str(asked.out)!r})")


def merge(asked: argparse.Namespace) -> None:
    from engine.peft_files import base_of, checkpoint_of, merge_adapter

    source = checkpoint_of(asked.source)
    base = asked.base if asked.base is not None else base_of(source)
    count = merge_adapter(source, base, asked.out)
    say(f"merged    {source} into {count} matrices of {base}")
    say(f"load      AutoModelForCausalLM.from_pretrained({str(asked.out)!r})")


def at(path: Path) -> str:
    """A path as model= takes it: with a slash, so that it is no option's name."""
    return str(path) if "/" in str(path) else f"./{path}"


def bytes_of(text: str) -> int:
    """5GB, 200MB, 1e9."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMGT]?)B?", text.strip().upper().replace("E", "e"))
    count = int(float(found[1]) * units[found[2]]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is no size; write 5GB or 200MB")
    return count


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = found.add_subparsers(required=True, metavar="COMMAND", dest="command")
    ignore = dict(action="append", default=[], metavar="KEY", help="a key of config.json that you say has no effect")

    one = commands.add_parser("import", help="transformers' weights -> ours", allow_abbrev=False)
    one.add_argument("source", metavar="FOLDER_OR_NAME", help="a folder of transformers, or OWNER/NAME on the hub")
    one.add_argument("out", nargs="?", type=Path, metavar="OUT", help="a new folder (./NAME-imported)")
    one.add_argument("--ignore", **ignore)  # type: ignore[arg-type]
    one.set_defaults(run=import_)

    one = commands.add_parser("export", help="our weights -> transformers'", allow_abbrev=False)
    one.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN", help="step-N, a run (its newest), or an import")
    one.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    one.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (as imported; of a run: fp32)")
    one.add_argument("--max-shard-size", type=bytes_of, default=5_000_000_000, metavar="SIZE", help="of one file (5GB)")
    one.add_argument("--tokenizer", metavar="PATH", help="in place of the run's: byte, a tokenizer.json or a folder")
    one.set_defaults(run=export)

    one = commands.add_parser("config", help="a config.json -> conf/model/NAME.yaml", allow_abbrev=False)
    one.add_argument("source", type=Path, metavar="FOLDER_OR_CONFIG_JSON")
    one.add_argument("name", metavar="NAME", help="the option's name: model=NAME")
    one.add_argument("--out", type=Path, metavar="FILE.yaml", help="another place than conf/model/NAME.yaml")
    one.add_argument("--overwrite", action="store_true", help="write over a file that is there")
    one.add_argument("--ignore", **ignore)  # type: ignore[arg-type]
    one.set_defaults(run=config)

    one = commands.add_parser("adapter", help="LoRA's adapters -> PEFT's format", allow_abbrev=False)
    one.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN", help="step-N, or a run (its newest)")
    one.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    one.set_defaults(run=adapter)

    one = commands.add_parser("merge", help="adapters added to their base's weights", allow_abbrev=False)
    one.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN", help="step-N, a run, or a folder of PEFT's")
    one.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    one.add_argument("--base", type=Path, metavar="FOLDER", help="in place of the run's own initialize_from")
    one.set_defaults(run=merge)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
