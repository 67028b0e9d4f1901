"""Odd files of real life: what is read is exactly the text, what is wrong is named with its file and line."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from conf.schema import BadLine, CorpusSource
from corpus.readers import Tally, documents
from corpus.sources import resolve
from tests.corpus.helpers import write_jsonl


def read(path, *, bad_lines=BadLine.fail, **fields):
    """(texts, tally) of one source."""
    tally = Tally()
    source = resolve(CorpusSource(path=str(path), **fields))
    return [document.text for document in documents(source, bad_lines=bad_lines, tally=tally)], tally


def file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b'\xef\xbb\xbf{"text": "with a BOM"}\n', ["with a BOM"]),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
        (b'\n{"text": "a"}\n   \n\r\n{"text": "b"}', ["a", "b"]),
        (b'{"text": "2024-01-01"}\n', ["2024-01-01"]),
        (b'{"text": "nul \\u0000 and \\ud83d\\ude00"}\n', ["nul \0 and \U0001f600"]),
        ('{"text": "\u2028 is no line end \u00e9"}\n'.encode(), ["\u2028 is no line end \u00e9"]),
        (b'{"text": "a", "extra": 1}\n{"other": {"x": [2]}, "text": "b"}\n', ["a", "b"]),
        (b'{"text": "a\\r\\nb"}\n', ["a\r\nb"]),
    ],
)
def test_jsonl_text_is_read_exactly(tmp_path, content, texts):
    got, tally = read(file(tmp_path, "x.jsonl", content))
    assert got == texts
    assert (tally.rows, tally.documents, tally.bad) == (len(texts), len(texts), 0)


def test_null_and_absent_text_is_skipped_and_counted(tmp_path):
    content = b'{"text": "a"}\n{"text": null}\n{"other": 1}\n{"text": ""}\n{"text": "b"}\n'
    texts, tally = read(file(tmp_path, "x.jsonl", content))
    assert texts == ["a", "b"]
    assert (tally.rows, tally.documents, tally.absent, tally.empty) == (5, 2, 2, 1)


@pytest.mark.parametrize(
    ("second_line", "says"),
    [
        (b'{"text": "cut o', "broken JSON"),
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        (b'{"text": 5}', "int 5, not a string"),
        (b'{"text": ["a"]}', "list"),
        (b'["text"]', "JSON list, not an object"),
        (b'{"text": "\\ud83d half"}', "surrogate"),
        (b'{"text": ' + b"[" * 100_000, "broken JSON"),
    ],
)
def test_a_broken_jsonl_line_is_named_or_skipped_and_counted(tmp_path, second_line, says):
    path = file(tmp_path, "x.jsonl", b'{"text": "a"}\n' + second_line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=says) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and "\n" not in message and "data.bad_lines=skip" in message
    texts, tally = read(path, bad_lines=BadLine.skip)
    assert texts == ["a", "b"]
    assert (tally.rows, tally.bad) == (3, 1) and f"{path}:2" in tally.first_bad


def test_a_truncated_last_line_is_named_with_its_line(tmp_path):
    path = file(tmp_path, "x.jsonl", b'{"text": "a"}\n{"text": "cut o')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: broken JSON"):
        read(path)


def test_a_missing_column_names_those_present(tmp_path):
    jsonl = file(tmp_path, "x.jsonl", b'{"content": "a", "id": 1}\n')
    table = file(tmp_path, "x.csv", b"content,id\na,1\n")
    parquet = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"], "id": [1]}), parquet)
    for path in (jsonl, table, parquet):
        with pytest.raises(ValueError, match=r"no column 'text'; it has content, id: set text_column"):
            read(path)
        assert read(path, text_column="content")[0] == ["a"]


def test_gzip_is_read_and_a_cut_stream_is_named(tmp_path):
    lines = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(500))
    packed = gzip.compress(lines)
    assert read(file(tmp_path, "x.jsonl.gz", packed))[0] == [f"document {i}" for i in range(500)]
    for content in (packed[:-20], packed[: len(packed) // 2], b"not gzip"):
        cut = file(tmp_path, "cut.jsonl.gz", content)
        with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: the gzip stream is damaged"):
            read(cut)


def test_text_files_are_one_document_each_in_path_order(tmp_path):
    (tmp_path / "b").mkdir()
    file(tmp_path, "b/1.txt", b"\xef\xbb\xbfone\r\ntwo\n")
    file(tmp_path, "a.txt", b"first")
    file(tmp_path, ".hidden.txt", b"no")
    file(tmp_path, "README.md", b"not part of a folder's corpus")
    file(tmp_path, "c.jsonl", b'{"text": "last"}\n')
    assert read(tmp_path)[0] == ["first", "one\r\ntwo\n", "last"]
    assert read(tmp_path / "**" / "*.txt")[0] == ["first", "one\r\ntwo\n"]
    assert read(tmp_path / "README.md")[0] == ["not part of a folder's corpus"]


def test_an_undecodable_text_file_is_named_with_its_line(tmp_path):
    file(tmp_path, "a.txt", b"fine")
    path = file(tmp_path, "b.txt", b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"b\.txt:3: is not UTF-8 \(byte 0xe9"):
        read(tmp_path)
    assert read(tmp_path, bad_lines=BadLine.skip)[0] == ["fine"]
    path.write_bytes("x".encode("utf-16"))
    with pytest.raises(ValueError, match=r"b\.txt: is UTF-16"):
        read(path)


def test_csv_cells_are_read_exactly(tmp_path):
    texts = ["plain", "2024-01-01", "007", 'two\nlines, and "quotes"', "x" * 300_000, ""]
    path = tmp_path / "x.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as out:
        csv.writer(out).writerows([["id", "text"], *enumerate(texts)])
    got, tally = read(path)
    assert got == texts[:-1] and tally.empty == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [(b"2,a,b", "3 cells under a header of 2"), (b"2,caf\xe9", "not UTF-8"), (b'2,"a"b', "broken CSV")],
)
def test_a_broken_csv_row_is_named_or_skipped(tmp_path, row, says):
    path = file(tmp_path, "x.csv", b'id,text\n1,"one\ntwo"\n' + row + b"\n3,c\n")
    with pytest.raises(ValueError, match=says) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert read(path, bad_lines=BadLine.skip)[0] == ["one\ntwo", "c"]


def test_an_unclosed_csv_quote_is_an_error_and_not_an_endless_loop(tmp_path):
    path = file(tmp_path, "x.csv", b'id,text\n1,a\n2,"never closed\n')
    with pytest.raises(ValueError, match="broken CSV"):
        read(path)
    assert read(path, bad_lines=BadLine.skip)[0] == ["a"]


def test_parquet_strings_are_read_and_other_types_refused(tmp_path):
    path = tmp_path / "x.parquet"
    column = pyarrow.array(["a", None, "2024-01-01", ""])
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "n": [1, 2, 3, 4]}), path)
    texts, tally = read(path)
    assert texts == ["a", "2024-01-01"] and (tally.absent, tally.empty) == (1, 1)
    pyarrow.parquet.write_table(pyarrow.table({"text": column.dictionary_encode()}), path)
    assert read(path)[0] == ["a", "2024-01-01"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    with pytest.raises(ValueError, match=r"x\.parquet: column 'text' is int64, not string"):
        read(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"x\.parquet: not a readable parquet file"):
        read(path)


def test_paths_that_lead_nowhere_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "none.txt", "no file matches"),
        (tmp_path / "*.jsonl", "no file matches"),
        (tmp_path / "empty", "the folder holds no .txt, .jsonl"),
        (file(tmp_path, "x.zip", b""), "not a corpus"),
        (file(tmp_path, "x.parquet.gz", b""), "unpack it first"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            read(path)
        assert str(path).split("/")[-1] in str(caught.value)


def test_unreadable_files_and_folders_are_named(tmp_path, monkeypatch):
    path = file(tmp_path, "x.txt", b"x")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"x\.txt: no permission"):
        read(path)

    def walk(top, onerror, **_):
        onerror(PermissionError(13, "Permission denied", str(tmp_path / "secret")))
        return []

    monkeypatch.setattr("os.walk", walk)
    with pytest.raises(ValueError, match=r"secret: the folder cannot be read \(Permission denied\)"):
        read(tmp_path)


def test_relative_paths_are_relative_to_the_folder_of_the_call(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "x.jsonl", ["here"])
    monkeypatch.chdir(tmp_path)
    assert read("x.jsonl")[0] == ["here"] and read("./*.jsonl")[0] == ["here"]


def test_max_documents_stops_early(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", ["a", "", "b", "c"])
    assert read(path, max_documents=2)[0] == ["a", "b"]


def test_the_standard_library_is_read_without_its_tests(tmp_path):
    source = resolve(CorpusSource(path="stdlib"))
    paths = [entry.path for entry in source.files]
    assert any(path.endswith("/json/decoder.py") for path in paths)
    assert not any("/test/" in path or "/tests/" in path or "site-packages" in path for path in paths)
    assert paths == [entry.path for entry in resolve(CorpusSource(path="stdlib")).files]
    assert source.num_bytes > 5_000_000


def test_a_fingerprint_changes_with_the_files_and_not_with_the_weight(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", ["a"])

    def fingerprint(**fields):
        return resolve(CorpusSource(path=str(path), **fields)).fingerprint()

    first = fingerprint()
    assert fingerprint(weight=3.0) == first != fingerprint(text_column="other")
    write_jsonl(path, ["a", "b"])
    assert fingerprint() != first
