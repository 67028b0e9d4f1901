"""Writes the small indexed files beside it with the programs that made such files, from checkouts of them:

    python tests/corpus/data/make_indexed.py GPT_NEOX MEGATRON_DEEPSPEED FAIRSEQ

The files here were made at gpt-neox ea7aefd8, Megatron-DeepSpeed 4efb479d and fairseq 3d262bb2. These packages do not
install beside today's torch, so each one's indexed_dataset.py is loaded alone and what it imports of them is stubbed.
What was written is read back with the same program and goes into indexed.json, which the tests compare with.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
EOD = 0
# Documents of sequences; one document has no sequence, one has two.
DOCUMENTS = [[[5, 6, 7, EOD]], [], [[1, 2], [3, EOD]], [[9, EOD]], [[255, 254, 12, 11, EOD]]]


def load(name: str, path: Path) -> types.ModuleType:
    for stub, names in {
        "megatron": {"print_rank_0": lambda *_: None},
        "fairseq": {"FairseqDataset": object},
        "fairseq.dataclass": {},
        "fairseq.dataclass.constants": {"DATASET_IMPL_CHOICES": None},
        "fairseq.data": {"FairseqDataset": object},
        "fairseq.data.fasta_dataset": {"FastaDataset": None},
        "fairseq.data.huffman": {"HuffmanMMapIndexedDataset": None, "HuffmanMMapIndex": None},
        "fairseq.file_io": {"PathManager": None},
    }.items():
        sys.modules[stub] = types.ModuleType(stub)
        vars(sys.modules[stub]).update(names, __path__=[])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(neox_path: str, deepspeed_path: str, fairseq_path: str) -> None:
    neox = load("neox_indexed", Path(neox_path) / "megatron/data/indexed_dataset.py")
    deepspeed = load("deepspeed_indexed", Path(deepspeed_path) / "megatron/data/indexed_dataset.py")
    fairseq = load("fairseq.data.indexed", Path(fairseq_path) / "fairseq/data/indexed_dataset.py")
    found = {}

    def write(name: str, builder, dataset, item, *, documents: bool = True) -> None:
        prefix = str(HERE / name)
        made = builder(prefix + ".bin")
        for document in DOCUMENTS:
            for sequence in document:
                made.add_item(item(sequence))
            if documents:
                made.end_document()
        made.finalize(prefix + ".idx")
        read = dataset(prefix)
        found[name] = {"sequences": [np.asarray(read[i]).tolist() for i in range(len(read))]}
        if documents:
            found[name]["documents"] = np.asarray(read.doc_idx).tolist()

    write("neox_mmap", lambda path: neox.MMapIndexedDatasetBuilder(path, np.uint16),
          lambda prefix: neox.MMapIndexedDataset(prefix, True), lambda ids: np.array(ids, np.uint16))  # fmt: skip
    write("neox_lazy", lambda path: neox.IndexedDatasetBuilder(path, np.int32), neox.IndexedDataset,
          lambda ids: np.array(ids, np.int32))  # fmt: skip
    write("deepspeed_mmap", lambda path: deepspeed.MMapIndexedDatasetBuilder(path, np.int64),
          lambda prefix: deepspeed.MMapIndexedDataset(prefix, True), torch.tensor)  # fmt: skip
    write("fairseq_mmap", lambda path: fairseq.MMapIndexedDatasetBuilder(path, np.int32),
          fairseq.MMapIndexedDataset, torch.tensor, documents=False)  # fmt: skip
    write("fairseq_lazy", lambda path: fairseq.IndexedDatasetBuilder(path, np.int32),
          lambda prefix: fairseq.IndexedDataset(prefix, fix_lua_indexing=True), torch.tensor,
          documents=False)  # fmt: skip

    merged = neox.MMapIndexedDatasetBuilder(str(HERE / "neox_merged.bin"), np.uint16)  # its merge drops the documents
    for _ in range(2):
        merged.merge_file_(str(HERE / "neox_mmap"))
    merged.finalize(str(HERE / "neox_merged.idx"))
    found["neox_merged"] = {"sequences": found["neox_mmap"]["sequences"] * 2}
    (HERE / "indexed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
