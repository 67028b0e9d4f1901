"""Text of real life through every reader: it comes through unharmed or gets one clear error, and the counts add up."""

import codecs
import csv
import gzip
import io
import json
import tempfile
import time
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import BadLine
from corpus.duplicates import Duplicates
from corpus.summary import table
from corpus.tokenizer import _without_long_runs, load_tokenizer, train_bpe
from tests.corpus.helpers import prepared, train_documents, write_jsonl
from tests.corpus.test_readers import file, read

datasets.disable_progress_bars()
ODD = [
    "",
    " ",
    "nul \0 inside\0",
    "\x01\x02\x07\x08\x1b[31m\x7f\x85",
    "cr\rlf\ncrlf\r\nline\u2028paragraph\u2029end",
    "\ufeffmark at the start",
    "\U0001f9d1\u200d\U0001f680 \U0001f1e9\U0001f1ea e\u0301",
    "\u0645\u0631\u062d\u0628\u0627 \u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd",
    "\ufffe\uffff\U0010ffff",
    'quotes " and, commas; \\ and \t tabs',
    "<|endoftext|></s>",
    "2024-01-01",
    "null",
]
TEXTS = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=30)), min_size=1, max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def jsonl(folder, texts, *, end="\n", ascii_only=False, mark=b""):
    lines = [json.dumps({"n": n, "text": text}, ensure_ascii=ascii_only) + end for n, text in enumerate(texts)]
    return file(folder, "x.jsonl", mark + "".join(lines).encode())


def table_of(folder, texts, *, end="\n", mark=b""):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([["n", "text"], *enumerate(texts)])
    return file(folder, "x.csv", mark + out.getvalue().encode())


def plain(folder, texts):
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        mark = codecs.BOM_UTF8 if text.startswith("\ufeff") else b""  # else it would be taken for one
        file(folder / "texts", f"{number:03}.txt", mark + text.encode())
    return folder / "texts"


def parquet(folder, texts):
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), folder / "x.parquet")
    return folder / "x.parquet"


def saved(folder, texts):
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def packed(write):
    def write_packed(folder, texts):
        path = write(folder, texts)
        names = [path] if path.is_file() else sorted(path.iterdir())
        for name in names:
            Path(f"{name}.gz").write_bytes(gzip.compress(name.read_bytes()))
            name.unlink()
        return Path(f"{path}.gz") if len(names) == 1 and path != names[0].parent else path

    return write_packed


FORMATS = {
    "txt": plain,
    "txt.gz": packed(plain),
    "jsonl": jsonl,
    "jsonl.gz": packed(jsonl),
    "csv": table_of,
    "csv.gz": packed(table_of),
    "parquet": parquet,
    "saved": saved,
}


@pytest.mark.parametrize("name", FORMATS)
@given(texts=TEXTS)
@settings(max_examples=25)
def test_every_reader_gives_the_same_text(name, texts):
    with tempfile.TemporaryDirectory() as folder:
        got, tally = read(FORMATS[name](Path(folder), texts))
    kept = [text for text in texts if text]
    assert got == kept
    assert (tally.rows, tally.documents, tally.empty, tally.absent, tally.bad) == (
        len(texts), len(kept), len(texts) - len(kept), 0, 0)  # fmt: skip
    assert tally.as_counts()["duplicates"] == len(kept) - len(set(kept))


@given(texts=TEXTS, end=ENDS, ascii_only=st.booleans(), mark=st.sampled_from([b"", codecs.BOM_UTF8]))
@settings(max_examples=60)
def test_line_ends_and_marks_are_no_part_of_the_text(texts, end, ascii_only, mark):
    kept = [text for text in texts if text]
    with tempfile.TemporaryDirectory() as folder:
        assert read(jsonl(Path(folder), texts, end=end, ascii_only=ascii_only, mark=mark))[0] == kept
        assert read(table_of(Path(folder), texts, end=end, mark=mark))[0] == kept


@given(ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"\r\r\n", b"\n\n \t\n"]), min_size=1, max_size=9))
@settings(max_examples=40)
def test_line_ends_may_be_mixed_in_one_file(ends):
    with tempfile.TemporaryDirectory() as folder:
        lines = [b'{"text": "%d"}' % n + end for n, end in enumerate(ends)]
        lines.insert(len(lines) // 2, codecs.BOM_UTF8)  # files joined by cat
        got, tally = read(file(Path(folder), "x.jsonl", b"".join(lines)))
    assert got == [str(n) for n in range(len(ends))] and tally.rows == len(ends)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["the text of a corpus, with lines\n and words " * 20, *ODD], size=400).save(str(path))
    return path


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@given(texts=TEXTS)
@settings(max_examples=25)
def test_tokens_decode_to_the_text(tmp_path_factory, bpe, tokenizer, texts):
    kept = [text for text in texts if text]
    if len(kept) < 2:
        return
    folder = tmp_path_factory.mktemp("text")
    name = "byte" if tokenizer == "byte" else str(bpe)
    corpus = prepared(folder, write_jsonl(folder / "x.jsonl", texts), tokenizer=name, vocab_size=400, sequence_length=1)
    tokens = corpus.train.streams[0].tokens
    ends = tokens.ends.tolist()
    parts = [tokens.read(a, b - 1) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert [corpus.tokenizer.decode(part) for part in parts] == kept
    assert all(tokens.read(end - 1, end)[0] == corpus.tokenizer.eod_id for end in ends)


ROWS = st.lists(st.sampled_from(["text", "again", "", None, "absent", "broken", "latin"]), min_size=1, max_size=30)


@given(rows=ROWS)
@settings(max_examples=60)
def test_the_counts_of_skipped_rows_add_up(rows):
    special = {"absent": b'{"n": 1}', "broken": b'{"text": "cut', "latin": b'{"text": "caf\xe9"}'}
    lines = [special.get(row) or json.dumps({"text": row}).encode() for row in rows]
    if all(row in ("absent", "broken", "latin") for row in rows):
        return
    with tempfile.TemporaryDirectory() as folder:
        got, tally = read(file(Path(folder), "x.jsonl", b"\n".join(lines)), bad_lines=BadLine.skip)
    wanted = [row for row in rows if row in ("text", "again")]
    assert got == wanted
    assert tally.as_counts() == {
        "rows": len(rows),
        "documents": len(wanted),
        "empty": rows.count(""),
        "absent": rows.count(None) + rows.count("absent"),
        "bad": rows.count("broken") + rows.count("latin"),
        "first_bad": tally.first_bad,
        "duplicates": len(wanted) - len(set(wanted)),
        "duplicates_of_every": 1,
    }


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv", "x.jsonl.gz"])
def test_sixteen_and_thirty_two_bit_text_is_named_even_where_bad_rows_are_skipped(tmp_path, name, mark):
    encoding = {2: "utf-16", 4: "utf-32"}[len(mark)] + ("-le" if mark[0] == 0xFF else "-be")
    content = mark + 'n,text\n1,"a"\n2,"b"\n'.encode(encoding)
    path = file(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    says = (
        rf"{name}: is UTF-{8 * len(mark)} \(it begins with the byte-order mark {mark.hex(' ')}\); convert it to UTF-8"
    )
    with pytest.raises(ValueError, match=says):
        read(path)
    if name == "x.txt":  # a file is a row there
        assert read(path, bad_lines=BadLine.skip)[1].bad == 1
    else:
        with pytest.raises(ValueError, match=says):
            read(path, bad_lines=BadLine.skip)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("x.txt", b"one\ntwo \xed\xa0\xbd half\n", r"x\.txt:2: is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\r{"text": "\xed\xa0\xbd"}\r', r"x\.jsonl:2: is not UTF-8"),
        ("x.jsonl", b'{"text": "\\ud83d"}', r"x\.jsonl:1: the text holds half a surrogate pair at character 0"),
        ("x.csv", b"n,text\r1,a\r2,\xed\xa0\xbd\r", r"x\.csv:3: is not UTF-8"),
        ("x.jsonl", b'{"text": "a\x01b"}', r"x\.jsonl:1: broken JSON \(Invalid control character at character 12\)"),
        ("x.jsonl", b'{"text": "a"}\n' + b"\0" * 64, r"x\.jsonl:2: broken JSON"),
        ("x.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", r"x\.jsonl:1: broken JSON \(Exceeds the limit"),
    ],
)
def test_what_is_no_text_gets_one_line_with_its_place(tmp_path, name, content, where):
    with pytest.raises(ValueError, match=where) as caught:
        read(file(tmp_path, name, content))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_columns_that_arrow_holds_in_other_ways_are_read_or_named(tmp_path):
    path = tmp_path / "x.parquet"
    for column, texts, absent in (
        (pyarrow.array(["a", None], pyarrow.large_string()), ["a"], 1),
        (pyarrow.array(["a", None], pyarrow.string_view()), ["a"], 1),
        (pyarrow.nulls(3), [], 3),  # a shard without any text
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        got, tally = read(path)
        assert (got, tally.absent) == (texts, absent)
    offsets = pyarrow.array([0, 2, 7], pyarrow.int32()).buffers()[1]
    broken = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"okbad\xff\xfe"))
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), path)
    with pytest.raises(ValueError, match=r"x\.parquet:2: is not UTF-8"):
        read(path)
    datasets.Dataset(pyarrow.table({"text": broken})).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"saved: a text after row 0 is not UTF-8"):
        read(tmp_path / "saved")


def test_files_without_a_row_among_others_are_passed_by(tmp_path):
    (tmp_path / "many").mkdir()
    for name, content in (("a.jsonl", b""), ("b.txt", b""), ("c.csv", b"n,text\n"), ("d.jsonl.gz", gzip.compress(b""))):
        file(tmp_path / "many", name, content)
    write_jsonl(tmp_path / "many" / "e.jsonl", ["the only text"])
    got, tally = read(tmp_path / "many")
    assert got == ["the only text"] and (tally.rows, tally.empty) == (2, 1)


LONG = "word, and " * 2_000_000


@pytest.mark.parametrize("name", ["txt", "jsonl", "jsonl.gz", "csv", "parquet"])
def test_a_line_of_twenty_megabytes_comes_through(tmp_path, name):
    corpus = prepared(tmp_path, FORMATS[name](tmp_path, [LONG, "short"]))
    assert [len(text) for text in train_documents(corpus)] == [20_000_000, 5]
    assert train_documents(corpus)[0] == LONG.encode()


def test_a_bpe_is_trained_on_long_runs_in_seconds(tmp_path):
    runs = [" " * 5_000_000, "-" * 5_000_000, "\0" * 3_000_000, "y" * 5_000_000, "\u3002" * 500_000]
    started = time.monotonic()  # 100,000 spaces took 18 s, and four times as many sixteen times as long
    tokenizer = train_bpe([f"some words {run} and more" for run in runs], size=400)
    assert time.monotonic() - started < 60
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    got = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = f"some {runs[0][:50_000]} words {runs[3][:50_000]}"
    assert got.decode(got.encode([text])[0]) == text


def test_a_bpe_takes_the_start_of_a_long_run_and_ordinary_text_whole():
    for kind in ("y", " ", "-", "\u3002", "\u00e9", "12", "_", "+/"):
        short, long, longer = (f"some words {(kind * 3000)[:size]} and more" for size in (990, 1500, 2500))
        assert train_bpe([long], size=300).to_str() == train_bpe([longer], size=300).to_str()
        assert len(_without_long_runs(long)) < len(short) + 20 and _without_long_runs(short) == short
    assert _without_long_runs("") == "" and _without_long_runs(LONG) == LONG
    mixed = "aB3/" * 5000  # nothing here is one pre-token
    assert _without_long_runs(mixed) == mixed


def test_repeated_documents_are_counted_and_kept(tmp_path):
    texts = [*map(str, range(50)), *["again"] * 4, *map(str, range(10))]
    corpus = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", texts))
    counts = corpus.sources[0].manifest["counts"]
    assert (counts["documents"], counts["duplicates"], counts["duplicates_of_every"]) == (64, 13, 1)
    assert "13 documents repeat an earlier one; they are kept" in table(corpus)
    assert len(train_documents(corpus)) == 64


def test_repeats_are_counted_in_bounded_memory():
    spread = 0x9E3779B97F4A7C15  # odd: a bijection of 64-bit numbers
    exact, bounded = Duplicates(), Duplicates(limit=1000)
    for number in range(30_000):
        for duplicates in (exact, bounded):
            duplicates.add((number % 20_000) * spread & (1 << 64) - 1)
    assert (exact.number, exact.every) == (10_000, 1)
    assert bounded.every == 32 and len(bounded._seen) <= 1000
    # About 312 of 10,000 repeats are compared: a deviation of sqrt(312) of them is 5.7 %, four of them 23 %.
    assert abs(bounded.number - 10_000) < 2300
