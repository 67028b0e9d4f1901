"""What a run begins with that its own checkpoints do not hold: weights of another run or of transformers, adapters of
PEFT; and, beside adapters, the frozen weights, which every start reads again.

A checkpoint of adapters names the folder of its frozen weights and their fingerprint and does not copy them. It goes on
beside these only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema import Config
from engine.checkpoint_folder import ADAPTER_CONFIG, MANIFEST, WEIGHTS
from engine.distributed import broadcast
from engine.failure import StopRun
from engine.held import boxes_to_load, frozen_boxes
from engine.storage import StoredTensors, weight_map, weights_fingerprint
from model.adapters import adapter_differences, adapter_tensors
from model.huggingface_names import names_in_folder, stored_tensors

if TYPE_CHECKING:
    from engine.checkpoints import Checkpoints


def initial_base(config: Config) -> dict[str, Any] | None:
    """What adapters stand beside where nothing was loaded; None where all weights are trained."""
    if config.lora.rank == 0:
        return None
    return {"initialize_from": None, "fingerprint": f"initial weights of seed {config.seed}"}


def load_weights(checkpoints: Checkpoints, folder: Path) -> None:
    """Only the weights, from this format's (checked) or transformers' folder; the optimizer starts anew. Of a run that
    trains adapters the frozen ones.

    Raises DamagedError, or ValueError where they are not this model's.
    """
    stored = StoredTensors(folder.parent)
    if (folder.parent / MANIFEST).is_file():
        stored.checked((folder.name,))
    model, groups = checkpoints.session.config.model, checkpoints.session.groups
    if checkpoints.base is None:
        boxes = boxes_to_load(checkpoints.trainer, stored_tensors(model), groups)
    else:
        fingerprint = broadcast(weights_fingerprint(folder) if checkpoints.session.rank == 0 else "")
        checkpoints.base = {"initialize_from": str(folder), "fingerprint": fingerprint}
        boxes = frozen_boxes(checkpoints.trainer, stored_tensors(model), groups)
    weights = ((folder.name, box, target) for kind, box, target in boxes if kind == WEIGHTS)
    stored.load(weights, called=names_in_folder(weight_map(folder), model)[0])


def load_adapter(checkpoints: Checkpoints, folder: Path) -> None:
    """Adapters from a folder of PEFT's; the optimizer starts anew."""
    boxes = boxes_to_load(checkpoints.trainer, checkpoints.places, checkpoints.session.groups)
    StoredTensors(folder.parent).load((folder.name, box, target) for kind, box, target in boxes if kind == WEIGHTS)


def adapter_folder(config: Config) -> Path | None:
    """The folder that lora.initialize_from means: PEFT's, or a checkpoint's; ValueError where it is another adapter."""
    if config.lora.initialize_from is None:
        return None
    said = f"lora.initialize_from={config.lora.initialize_from}"
    if config.lora.rank == 0:
        raise ValueError(f"{said} needs adapters, but lora.rank=0; set the rank that they have, or merge them first")
    given = Path(config.lora.initialize_from).expanduser().absolute()
    folder = given / WEIGHTS if (given / WEIGHTS).is_dir() else given
    try:
        about = json.loads((folder / ADAPTER_CONFIG).read_text())
        held = set(weight_map(folder))
    except (ValueError, OSError) as error:
        raise ValueError(f"{said} is no PEFT adapter ({error})") from None
    differences = adapter_differences(about, config.model, config.lora)
    wanted = {place.name for place in adapter_tensors(config.model, config.lora).values()}
    if not differences and held != wanted:
        odd = min(held ^ wanted)
        differences = [f"it has {'no' if odd in wanted else 'also a'} tensor {odd}"]
    if differences:
        raise ValueError(f"{said} is another adapter: {'; '.join(differences)}")
    return folder


def require_base(path: Path, theirs: dict[str, Any] | None, ours: dict[str, Any] | None) -> None:
    """StopRun where adapters of a checkpoint were trained beside other weights than those of this run."""
    if ours is not None and (theirs is None or theirs["fingerprint"] != ours["fingerprint"]):
        raise StopRun(
            f"{path} was trained beside {_named(theirs)}, and this run has {_named(ours)}; set initialize_from to the "
            "same weights"
        )


def _named(base: dict[str, Any] | None) -> str:
    if base is None:
        return "no frozen weights"
    return f"the weights of {base['initialize_from']}" if base["initialize_from"] else base["fingerprint"]
