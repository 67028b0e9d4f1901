"""The index of Megatron's indexed data: every header there has been is read, every fault is named."""

import json
import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from corpus.megatron_index import read_index
from corpus.tokenizer import train_bpe
from tests.corpus.helpers import prepared
from tests.corpus.indexed import CODES, write_indexed

DATA = Path(__file__).parent / "data"
WRITTEN = json.loads((DATA / "indexed.json").read_text())  # read back by the programs that wrote the files
DOCUMENTS = [[5, 6, 7, 0], [], [1, 2, 0], [9, 0]]


def documents_in(prefix):
    index = read_index(prefix)
    tokens = index.tokens().astype(np.int64) + index.plus
    bounds = index.offsets(0, index.num_documents)
    return [tokens[a:b].tolist() for a, b in pairwise(bounds)]


def expected(name):
    sequences = WRITTEN[name]["sequences"]
    marks = WRITTEN[name].get("documents", range(len(sequences) + 1))
    return [[*chain(*sequences[a:b])] for a, b in pairwise(marks)]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_files_of_gpt_neox_megatron_deepspeed_and_fairseq_hold_the_documents_those_programs_read(name):
    assert documents_in(DATA / name) == expected(name)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_each_of_their_documents_is_closed_once(tmp_path, name):
    train_bpe(["x"], size=257).save(str(tmp_path / "tokenizer.json"))  # id 0 ends a document
    fields = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence_length": 4}
    corpus = prepared(tmp_path, DATA / name, **fields)
    stream = corpus.train.streams[0].tokens
    closed = [[*document, *([] if document[-1] == 0 else [0])] for document in expected(name) if document]
    assert stream.read(0, len(stream)).tolist() == [*chain(*closed)]
    counts = corpus.sources[0].manifest["counts"]
    assert (counts["rows"], counts["documents"]) == (len(expected(name)), len(closed))
    assert counts["closed"] == sum(document[-1:] == [0] for document in expected(name))


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_integer_type_is_read(tmp_path, code):
    documents = [[1, 2], [], [100, 0, 3]]
    assert documents_in(write_indexed(tmp_path / "x", documents, dtype=code)) == documents


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"magic": b"MMIDRET\x00\x00"}, r"x\.idx: an index of chunks for retrieval"),
        ({"magic": b"PAR1....."}, r"x\.idx: not an index of Megatron's"),
        ({"version": 2}, r"x\.idx: version 2 of the index is not known"),
        ({"code": 6}, r"x\.idx: holds floating-point numbers \(dtype code 6\)"),
        ({"code": 99}, r"x\.idx: dtype code 99 is none of"),
        ({"code": 4}, r"x\.idx: sequence 1 is said to begin at 8, but those before it end at 16"),
        ({"num_sequences": 2**60}, r"x\.idx: cut off: \d+ bytes where 1152921504606846976 sequences"),
        ({"num_sequences": 3}, r"x\.idx: too long: \d+ bytes where 3 sequences and 5 document marks take"),
        ({"tail": b"\x00" * 4}, r"x\.idx: has a mode for each sequence, so it is multimodal data"),
        ({"tail": b"\x00" * 7}, r"x\.idx: too long: "),
        ({"lengths": [4, 0, -3, 8]}, r"x\.idx: sequence 2 is -3 ids long"),
        ({"lengths": [4, 0, 2, 3]}, r"x\.idx: sequence 3 is said to begin at 14, but those before it end at 12"),
        ({"lengths": [4, 0, 3, 5]}, r"x\.bin: cut off: 18 bytes where x\.idx lists 12 ids of 2 bytes \(24\)"),
        ({"lengths": [4, 0, 3, 1]}, r"x\.bin: too long: 18 bytes where x\.idx lists 8 ids"),
        ({"marks": [0, 1, 2, 3, 3]}, r"x\.idx: its documents go from sequence 0 to 3, not from 0 to 4"),
        ({"marks": [1, 1, 2, 3, 4]}, r"x\.idx: its documents go from sequence 1 to 4"),
        ({"marks": [0, 3, 2, 3, 4]}, r"x\.idx: document 1 ends before it begins"),
        ({"num_marks": 0, "marks": []}, r"x\.idx: its documents go from sequence none to none"),
    ],
)
def test_a_damaged_index_is_named_with_what_is_wrong(tmp_path, fields, says):
    prefix = write_indexed(tmp_path / "x", DOCUMENTS, **fields)
    with pytest.raises(ValueError, match=says) as caught:
        read_index(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepspeed_mmap", "neox_lazy", "fairseq_lazy", "fairseq_mmap"])
def test_no_cut_of_either_file_is_read_as_something_else(tmp_path, name):
    for suffix in (".idx", ".bin"):
        content = (DATA / f"{name}{suffix}").read_bytes()
        for length in range(len(content)):
            for kept in (".idx", ".bin"):
                (tmp_path / f"x{kept}").write_bytes((DATA / f"{name}{kept}").read_bytes())
            (tmp_path / f"x{suffix}").write_bytes(content[:length])
            with pytest.raises(ValueError, match=rf"x\{suffix}: "):
                read_index(tmp_path / "x")


def test_a_lazy_index_of_tables_or_of_another_width_is_named(tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"x{suffix}").write_bytes((DATA / f"neox_lazy{suffix}").read_bytes())
    path = tmp_path / "x.idx"
    good = path.read_bytes()
    path.write_bytes(good[:24] + struct.pack("<Q", 8) + good[32:])
    with pytest.raises(ValueError, match=r"says 8 bytes an id, but dtype code 4 has 4"):
        read_index(tmp_path / "x")
    path.write_bytes(good[:64] + struct.pack("<Q", 2) + good[72:])  # the first item has two dimensions
    with pytest.raises(ValueError, match=r"its items have more than one dimension"):
        read_index(tmp_path / "x")
