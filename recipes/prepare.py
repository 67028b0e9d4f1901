"""Tokenise a corpus ahead of training: text to memory-mapped token files and a manifest, once.

    python recipes/prepare.py data.tokenizer=bpe model.vocab_size=4096
    python recipes/prepare.py 'data.sources=[{path: books/*.jsonl.gz, weight: 3}, {path: stdlib}]'
    python recipes/prepare.py data=chat data.sources.0.path=chats.jsonl data.tokenizer=FOLDER model.vocab_size=32000
    python recipes/prepare.py 'data.sources=[{path: books}]' data.tokenizer=FOLDER prepare.megatron=out/books

Training does the same by itself when the files are not there; this recipe does it on one process without a model. With
prepare.megatron=PREFIX it also writes the tokens as Megatron's indexed data, PREFIX_train.bin and .idx and
PREFIX_validation.bin and .idx.
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


def run(config: Config, plan: ParallelPlan) -> int:
    from corpus.batches import require_batch
    from corpus.conversation_summary import conversation_table
    from corpus.corpora import prepare_corpus
    from corpus.megatron_write import targets, write_corpus
    from corpus.summary import table
    from engine.failure import refuse
    from engine.session import announce

    data, wanted = config.data, config.prepare.megatron
    try:
        if wanted and data.format is DataFormat.conversations:
            raise ValueError(
                "prepare.megatron writes text, which knows no masks of the loss, but data.format=conversations"
            )
        places = {}
        if wanted:
            places = targets(
                wanted,
                num_sources=len(data.sources),
                validation=data.validation_fraction > 0,
                overwrite=config.prepare.overwrite,
            )
        corpus = prepare_corpus(
            data, vocab_size=config.model.vocab_size, seed=config.seed, objective=config.objective,
            weights=config.initialize_from is not None, progress=announce,
        )  # fmt: skip
        announce(table(corpus) if data.format is DataFormat.text else conversation_table(corpus))
        if not wanted:  # Megatron's files know neither batch nor sequence length
            require_batch(corpus.train, global_batch_size=config.train.global_batch_size)
        for written in write_corpus(corpus, places):
            announce(written.line())
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    main(run)
