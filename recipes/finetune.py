"""Fine-tune a transformer on conversations, under any plan: loss on the assistant's tokens only, whole or by LoRA.

    python recipes/finetune.py experiment=chat_tiny
    deepspeed --num_gpus 8 recipes/finetune.py model=llama_8b parallel=tp4_pp2 data=chat \
        data.sources.0.path=chats.jsonl data.tokenizer=FOLDER initialize_from=FOLDER lora=all_linear

What a fine-tuning run is beside a pretraining one: other rows (data.format=conversations), weights to begin with, and
adapters where lora.rank is set. The steps of training are those of recipes/pretrain.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config, DataFormat
from parallel.plan import ParallelPlan
from recipes import pretrain


def run(config: Config, plan: ParallelPlan) -> int:
    """Config and plan are valid here; torch is imported from here on."""
    if config.data.format is not DataFormat.conversations:
        from engine.failure import refuse

        return refuse(
            ValueError(
                "recipes/finetune.py learns from conversations, but data.format=text; set data=chat "
                "data.sources.0.path=FILE, or use recipes/pretrain.py"
            )
        )
    return pretrain.run(config, plan)


if __name__ == "__main__":
    main(run)
