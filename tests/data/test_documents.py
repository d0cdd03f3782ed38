"""Reading documents: formats, names, and errors that name the place."""

from __future__ import annotations

import io
import sys

import pytest

from depthdial.data import documents
from depthdial.data.documents import Document, find_files, read_documents


def read(*paths, **options):
    return list(read_documents(find_files(paths).supported, **options))


def test_txt_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo é", encoding="utf-8")
    assert read(tmp_path / "a.txt") == [Document("a.txt", "one\n\ntwo é")]


def test_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "a.txt")[0].text == "hello"


def test_jsonl_row_is_one_document_named_by_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two\\u2028x"}\n')
    assert read(path) == [Document("a.jsonl:1", "one"), Document("a.jsonl:3", "two\u2028x")]


def test_jsonl_field_can_be_chosen(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert read(tmp_path / "a.jsonl", text_field="body")[0].text == "yes"


def test_null_text_is_an_empty_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    assert read(tmp_path / "a.jsonl") == [Document("a.jsonl:1", "")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', "line 2 has no field 'text'; it has body, id"),
        ('{"text": 5}', "line 2: field 'text' must be text, got int"),
        ('{"text": "x"', "line 2 is not valid JSON"),
        ('["x"]', "line 2 must be a JSON object, got list"),
        ('{"text": "\\ud800"}', "line 2: field 'text' has half a surrogate pair at character 0"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl {message}"):
        read(path)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text .byte 0xff at 2"):
        read(tmp_path / "a.txt")


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'depthdial[train]'")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_row_is_one_document_named_by_its_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "text": ["one", "two"]})
    expected = [Document("a.parquet:1", "one"), Document("a.parquet:2", "two")]
    assert read(tmp_path / "a.parquet") == expected


def test_parquet_without_the_column_lists_its_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"id": [1], "body": ["x"]})
    with pytest.raises(ValueError, match="no field 'text'; it has id, body"):
        read(tmp_path / "a.parquet")


def test_parquet_column_of_numbers_is_refused_with_its_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": [3]})
    with pytest.raises(ValueError, match="a.parquet row 1: field 'text' must be text, got int"):
        read(tmp_path / "a.parquet")


def test_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'depthdial[train]'")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match="a.parquet is not a parquet file"):
        read(tmp_path / "a.parquet")


def damaged_parquet(path, *, checksums=False, compression="none"):
    """Two groups of 40 rows in pages of 10; the second group's third page is damaged."""
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'depthdial[train]'")
    from pyarrow import parquet

    texts = [f"row {row} " + "x" * 90 for row in range(1, 81)]
    parquet.write_table(
        pyarrow.table({"id": range(80), "text": texts}), path, row_group_size=40,
        use_dictionary=False, write_statistics=False, compression=compression, data_page_size=1,
        write_batch_size=10, write_page_checksum=checksums,
    )  # fmt: skip
    raw = bytearray(path.read_bytes())
    if compression == "none":
        # A letter where the file has checksums; where it has none, the length of the text.
        start = raw.index(b"row 61 ")
        raw[start if checksums else start - 1] ^= 0x7F
    else:
        chunk = parquet.ParquetFile(path).metadata.row_group(1).column(1)
        middle = chunk.data_page_offset + chunk.total_compressed_size * 5 // 8
        raw[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ({"compression": "none"}, 61),
        ({"compression": "none", "checksums": True}, 61),
        ({"compression": "snappy"}, 61),
        ({"compression": "snappy", "checksums": True}, 61),
    ],
)
def test_f11_one_corrupt_parquet_page_is_named_with_its_first_row(tmp_path, kind, row):
    """The error of the reader named no file, and was reported as a disk that cannot be written."""
    damaged_parquet(tmp_path / "a.parquet", **kind)
    with pytest.raises(ValueError, match=rf"a\.parquet row {row} cannot be read: .*Copy the file"):
        read(tmp_path / "a.parquet")


def test_f11_damage_below_other_columns_does_not_matter(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"id": ["only here"], "text": ["one"]})
    path.write_bytes(path.read_bytes().replace(b"only here", b"\xff" * 9, 1))
    assert read(path) == [Document("a.parquet:1", "one")]


def test_f11_invalid_utf8_in_a_column_is_named_with_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"text": ["fine"] * 2000 + ["spoilt"] + ["fine"] * 5})
    raw = path.read_bytes()
    assert raw.count(b"spoilt") >= 1
    path.write_bytes(raw.replace(b"spoilt", b"spo\xfflt"))
    message = r"a\.parquet row 2001 is not UTF-8 text .byte 0xff at 3"
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x", "id": ' + "9" * 5000 + "}", "a whole number has 5,000 digits"),
        ('{"text": "x", "id": -' + "9" * 5000 + "}", "a whole number has 5,001 digits"),
        ('{"text": "x", "tree": ' + "[" * 100_000 + "]" * 100_000 + "}", "brackets nest too deep"),
        ("[" * 100_000, "brackets nest too deep"),
        ('{"a":' * 100_000, "brackets nest too deep"),
    ],
)
def test_f11_a_line_of_json_that_no_reader_holds_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl line 2 is not valid JSON: .*{message}"):
        read(path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_f11_a_disk_that_fails_while_reading_is_named_with_the_file(tmp_path, suffix, monkeypatch):
    """The message said that the destination could not be written."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        write_parquet(path, {"text": ["one"]})
        from pyarrow import parquet

        def fail(*args, **kwargs):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fail)
    else:
        path.write_text('{"text": "one"}\n')

        class Broken(io.BytesIO):
            def read(self, size=-1):
                raise OSError(5, "Input/output error")

            readinto = readline = __next__ = read

        monkeypatch.setattr("pathlib.Path.open", lambda self, *mode, **rest: Broken())
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(path)
    assert caught.value.filename == str(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'depthdial\[train\]'"):
        read(tmp_path / "a.parquet")


def test_folder_is_read_recursively_in_sorted_order_with_names_inside_it(tmp_path):
    folder = tmp_path / "books"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.TXT"):
        (folder / name).write_text("x")
    names = [document.name for document in read(folder)]
    assert names == ["books/a.txt", "books/b.txt", "books/sub/c.TXT"]


def test_unsupported_and_hidden_files_of_a_folder_are_listed(tmp_path):
    folder = tmp_path / "books"
    (folder / ".git").mkdir(parents=True)
    for name in ("a.txt", "b.pdf", ".git/c.txt"):
        (folder / name).write_text("x")
    files = find_files([folder])
    assert [name for name, _ in files.supported] == ["books/a.txt"]
    assert files.unsupported == ["books/.git/c.txt", "books/b.pdf"]


def test_single_file_of_another_type_is_refused(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match="a.pdf is not one of .txt, .jsonl, .parquet"):
        find_files([tmp_path / "a.pdf"])


def test_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder at .*absent"):
        find_files([tmp_path / "absent"])


def test_folder_without_any_readable_file_is_refused(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match="no .txt, .jsonl, .parquet file in .*1 files of other"):
        find_files([tmp_path])


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    with pytest.raises(ValueError, match="both named 'a.txt'"):
        find_files([tmp_path / "x" / "a.txt", tmp_path / "y" / "a.txt"])


def test_a_file_given_twice_counts_once(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.pdf"):
        (folder / name).write_text("x")
    twice = [folder, folder / "a.txt", folder / ".." / "books" / "b.txt", folder]
    files = find_files(twice)
    assert [name for name, _ in files.supported] == ["books/a.txt", "books/b.txt"]
    assert files.unsupported == ["books/c.pdf"]


def test_a_link_with_its_own_name_is_its_own_file(tmp_path):
    """Download caches hold files of equal content as links to one place."""
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert len(find_files([tmp_path]).supported) == 2


@pytest.fixture
def small_parts(monkeypatch):
    """Files of more than 16 bytes are large, and are read 16 bytes at a time."""
    monkeypatch.setattr("depthdial.data.documents.PART_BYTES", 16)


def large_text(path, *, mark=b""):
    text = "caf\u00e9 \u4e2d\u6587 \U0001f600 na\u00efve\r\n" * 9 + "end"
    path.write_bytes(mark + text.encode())
    return text


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_f32_a_large_text_file_is_the_text_that_a_small_one_would_be(tmp_path, mark, small_parts):
    text = large_text(tmp_path / "a.txt", mark=mark)
    [document] = read(tmp_path / "a.txt")
    assert (document.name, document.text) == ("a.txt", text)
    assert "".join(document.parts()) == text
    assert all(len(part) <= 17 for part in document.parts())


def test_f32_a_piece_of_a_large_text_file_is_that_of_its_characters(tmp_path, small_parts):
    text = large_text(tmp_path / "a.txt")
    [document] = read(tmp_path / "a.txt")
    for start, end in ((0, 5), (3, 40), (17, 17), (60, None), (len(text), None), (0, len(text))):
        piece = document.piece("b", start, end)
        assert (piece.name, piece.text) == ("b", text[start:end])
        assert piece.piece("c", 2, 4).text == text[start:end][2:4]
        assert piece.piece("c", 2, None).text == text[start:end][2:]
        assert Document("a", text).piece("b", start, end) == Document("b", text[start:end])


def test_f32_a_document_in_memory_comes_in_parts_too(small_parts):
    assert list(Document("a", "x" * 40).parts()) == ["x" * 16, "x" * 16, "x" * 8]
    assert list(Document("a", "").parts()) == []


def test_f11_a_large_text_file_that_is_not_utf8_is_named_with_the_place(tmp_path, small_parts):
    raw = "\u4e2d".encode() * 30
    for place, damaged in ((61, raw[:61] + b"\xff" + raw[62:]), (88, raw[:-1]), (15, b"a" * 15)):
        path = tmp_path / "a.txt"
        path.write_bytes(damaged if place != 15 else damaged + b"\xe4\xb8" + b"a" * 9)
        [document] = read(path)
        with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text .byte 0x.. at (\d+)") as x:
            list(document.parts())
        # The first byte of the character that is spoilt.
        assert f" at {place // 3 * 3})" in str(x.value)


def test_f32_rows_of_a_parquet_file_are_read_by_size(tmp_path, monkeypatch):
    """A thousand rows in one go may be a thousand books."""
    write_parquet(tmp_path / "a.parquet", {"text": [f"{row}" * 200 for row in range(10, 90)]})
    monkeypatch.setattr("depthdial.data.documents.PART_BYTES", 4000)
    sizes = []
    batches = documents._batches

    def counted(*args):
        for batch in batches(*args):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(documents, "_batches", counted)
    assert [d.text for d in read(tmp_path / "a.parquet")] == [f"{r}" * 200 for r in range(10, 90)]
    assert max(sizes) <= 10
