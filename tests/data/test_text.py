"""prepare: splits, counts, atomic writing; fault B23."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthdial.data import text
from depthdial.data.documents import Document
from depthdial.data.packing import IGNORE, PackedText
from depthdial.data.shards import SPLITS, SplitWriter, TokenShards
from depthdial.data.text import _cutting_place, prepare, split_by_hash
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.locks import InUseError


@pytest.fixture
def books(tmp_path):
    """Twenty small text files."""
    folder = tmp_path / "books"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(f"This is book {i}, naïve. " * (i + 1))
    return folder


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_document_comes_back_with_name_text_and_byte_count(books, tmp_path):
    prepare([books], tmp_path / "out")
    tokenizer = Tokenizer.from_dir(tmp_path / "out")
    found = {}
    for split in SPLITS:
        for document in TokenShards.open(tmp_path / "out", split).documents():
            assert document.tokens_T[-1] == tokenizer.eos_id
            text = tokenizer.decode(document.tokens_T[:-1].tolist())
            assert document.num_bytes == len(text.encode())
            found[document.name] = text
    assert found == {f"books/{path.name}": path.read_text() for path in books.iterdir()}


def test_report_agrees_with_the_folder(books, tmp_path):
    report = prepare([books], tmp_path / "out")
    for split in SPLITS:
        shards = TokenShards.open(tmp_path / "out", split)
        assert report.documents[split] == shards.num_documents
        assert report.tokens[split] == shards.num_tokens
        assert report.num_bytes[split] == shards.num_bytes.sum()
    assert report.vocab_size == shards.vocab_size


def test_preparing_twice_gives_equal_files(books, tmp_path):
    for name in ("one", "two"):
        prepare([books], tmp_path / name, vocab_size=270)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_tokenizer_is_not_trained_on_the_validation_split(books, tmp_path):
    names = [f"books/{path.name}" for path in books.iterdir()]
    for name in split_by_hash(names, valid_frac=0.05):
        (tmp_path / name).write_text("qzqzqz " * 500)
    prepare([books], tmp_path / "out")
    with pytest.raises(ValueError):
        Tokenizer.from_dir(tmp_path / "out").token_id("qz")


def test_given_tokenizer_is_used_and_kept(books, tmp_path, byte_tokenizer):
    prepare([books], tmp_path / "out", tokenizer=byte_tokenizer)
    shards = TokenShards.open(tmp_path / "out", "train")
    assert shards.vocab_size == 257
    assert (shards.lengths == shards.num_bytes + 1).all()


def test_large_vocabulary_is_stored_in_four_bytes(tmp_path, books, byte_tokenizer):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(byte_tokenizer.to_json())
    backend.add_tokens([f"<extra {i}>" for i in range(70_000)])
    prepare([books], tmp_path / "out", tokenizer=Tokenizer(backend))
    shards = TokenShards.open(tmp_path / "out", "train")
    assert (shards.tokens.dtype.itemsize, shards.vocab_size) == (4, 70_257)


def test_tokenizer_and_vocab_size_together_are_refused(books, tmp_path, byte_tokenizer):
    with pytest.raises(ValueError, match="not both"):
        prepare([books], tmp_path / "out", tokenizer=byte_tokenizer, vocab_size=300)


@given(count=st.integers(2, 60), frac=st.floats(0.001, 0.999), offset=st.integers(0, 10**6))
def test_split_has_a_document_on_each_side_from_two_on(count, frac, offset):
    names = [f"document {offset + i}" for i in range(count)]
    assert 0 < len(split_by_hash(names, valid_frac=frac)) < count


def test_split_of_a_name_does_not_depend_on_the_other_names():
    names = [f"document {i}" for i in range(1000)]
    everything = split_by_hash(names, valid_frac=0.3)
    assert 250 < len(everything) < 350
    assert split_by_hash(names[:500], valid_frac=0.3) == everything & set(names[:500])


def test_no_validation_split_on_request(books, tmp_path):
    report = prepare([books], tmp_path / "out", valid_frac=0.0)
    assert report.documents == {"train": 20, "valid": 0}
    assert "cannot validate" in str(report)
    with pytest.raises(ValueError, match="no document in split 'valid'"):
        TokenShards.open(tmp_path / "out", "valid")


def test_single_document_is_cut_at_a_line_end_near_its_end(tmp_path, byte_tokenizer):
    text = "".join(f"line number {i:04d}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=byte_tokenizer, valid_frac=0.1)
    parts = {split: next(TokenShards.open(tmp_path / "out", split).documents()) for split in SPLITS}
    decoded = [byte_tokenizer.decode(parts[split].tokens_T.tolist()) for split in SPLITS]
    assert "".join(decoded) == text
    assert decoded[0].endswith("\n")
    assert 0.09 < len(decoded[1]) / len(text) < 0.11
    assert [parts[split].name for split in SPLITS] == ["a.txt#train", "a.txt#valid"]


def test_single_document_too_short_to_cut_goes_to_training(tmp_path, byte_tokenizer):
    (tmp_path / "a.txt").write_text("x")
    report = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=byte_tokenizer)
    assert report.documents == {"train": 1, "valid": 0}


@pytest.mark.parametrize("valid_frac", [-0.1, 1.0])
def test_impossible_valid_frac_is_refused(books, tmp_path, valid_frac):
    with pytest.raises(ValueError, match=f"valid_frac={valid_frac} must be"):
        prepare([books], tmp_path / "out", valid_frac=valid_frac)


@pytest.fixture
def gaps(tmp_path):
    """An empty, a blank, a null and a one-token document among ordinary ones."""
    path = tmp_path / "gaps.jsonl"
    texts = ['"ordinary text"', '""', '" \\n"', "null", '"x"', '"y"', '"more text"']
    path.write_text("".join(f'{{"text": {text}}}\n' for text in texts))
    return path


def test_b23_empty_and_one_token_documents_are_counted_and_reported(gaps, tmp_path, byte_tokenizer):
    report = prepare([gaps], tmp_path / "out", tokenizer=byte_tokenizer)
    assert (report.empty_documents, report.one_token_documents) == (3, 2)
    assert sum(report.documents.values()) == 4
    assert "skipped 3 empty documents" in str(report)
    assert "2 documents have a single token" in str(report)


def test_b23_no_packed_document_is_of_length_zero(gaps, tmp_path, byte_tokenizer):
    """A zero-length segment crashed attention; a one-token document still has one target."""
    prepare([gaps], tmp_path / "out", tokenizer=byte_tokenizer, valid_frac=0.0)
    shards = TokenShards.open(tmp_path / "out", "train")
    assert shards.lengths.min() == 2
    batch = PackedText(shards, context=4, seed=0, opening_id=shards.eos_id).rows(0, 30)
    assert (batch.targets_BT != IGNORE).all()
    assert (batch.document_ids_BT.diff(dim=1) >= 0).all()


def test_b23_only_empty_documents_is_a_clear_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(ValueError, match="nothing to prepare: all 2 documents are empty"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "words"), [(0, "the files hold no document"), (1, "the only document is empty")]
)
def test_no_text_in_few_documents_is_said_in_plain_words(tmp_path, rows, words):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * rows)
    with pytest.raises(ValueError, match=f"nothing to prepare: {words}"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")


def test_an_input_file_that_cannot_be_read_again_is_not_called_unwritable(
    books, tmp_path, monkeypatch
):
    """Documents are read several times; the error of a later pass names the file it is of."""

    def vanished(*args):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "books/0.txt")

    monkeypatch.setattr("depthdial.data.text._write_splits", vanished)
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'books/0.txt'"):
        prepare([books], tmp_path / "out", vocab_size=270)


def test_unsupported_files_are_reported(books, tmp_path):
    (books / "cover.png").write_bytes(b"x")
    report = prepare([books], tmp_path / "out")
    assert report.unsupported_files == ("books/cover.png",)
    assert "skipped 1 files that are not .txt, .jsonl, .parquet: books/cover.png" in str(report)


def test_f18_a_field_name_without_a_file_of_rows_is_refused(books, tmp_path):
    with pytest.raises(ValueError, match="text_field=body has no effect: none of the files is"):
        prepare([books], tmp_path / "out", text_field="body")
    (books / "rows.jsonl").write_text('{"body": "some text"}\n', encoding="utf-8")
    assert prepare([books], tmp_path / "out", text_field="body").documents["train"]


def test_f18_a_folder_of_which_nothing_is_read_is_refused_beside_others(books, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="pictures holds no .txt, .*nothing of it would be read"):
        prepare([books, tmp_path / "pictures"], tmp_path / "out")


def test_existing_folder_is_refused_and_untouched(books, tmp_path):
    prepare([books], tmp_path / "out", vocab_size=270)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="out exists.*overwrite=True"):
        prepare([books], tmp_path / "out", vocab_size=280)
    assert contents(tmp_path / "out") == before


def test_overwrite_replaces_a_prepared_folder_and_leaves_nothing_behind(books, tmp_path):
    prepare([books], tmp_path / "out", vocab_size=270)
    prepare([books], tmp_path / "out", vocab_size=280, overwrite=True)
    assert TokenShards.open(tmp_path / "out", "train").vocab_size == 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "out"]


def test_overwrite_does_not_replace_a_folder_of_something_else(books, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mine has no intact \.depthdial\.json.* is not replaced"):
        prepare([books], tmp_path / "mine", overwrite=True)
    assert contents(tmp_path / "mine") == {"notes.txt": b"mine"}


@pytest.mark.parametrize("place", ["out/raw", "out", "out/raw/00.txt"])
def test_f22_a_folder_is_not_prepared_over_its_own_input(books, tmp_path, place):
    """`prepare DIR/raw --out DIR --overwrite` once deleted its input and all else in DIR."""
    prepare([books], tmp_path / "out", vocab_size=270)
    books.rename(tmp_path / "out" / "raw")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="lie in one another; what is read is never changed"):
        prepare([tmp_path / place], tmp_path / "out", vocab_size=270, overwrite=True)
    assert tree(tmp_path) == before


def test_f22_a_folder_of_texts_may_hold_what_is_prepared_from_it(books, tmp_path):
    """`cd texts; depthdial prepare . --out data`: but not with more texts inside."""
    for vocab_size in (270, 280):
        prepare([books], books / "out", vocab_size=vocab_size, overwrite=True)
        assert TokenShards.open(books / "out", "train").vocab_size == vocab_size
    (books / "out" / "raw").mkdir()
    (books / "out" / "raw" / "more.txt").write_text("more")
    with pytest.raises(ValueError, match="holds the folder 'raw', which depthdial did not write"):
        prepare([books], books / "out", vocab_size=270, overwrite=True)
    assert (books / "out" / "raw" / "more.txt").read_text() == "more"


def test_f22_a_loose_file_stays_where_data_are_prepared_again(books, tmp_path):
    prepare([books], tmp_path / "out", vocab_size=270)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    prepare([books], tmp_path / "out", vocab_size=280, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert TokenShards.open(tmp_path / "out", "train").vocab_size == 280


def test_f22_data_are_not_prepared_over_a_model_and_not_through_a_link(books, tmp_path, byte_base):
    prepare([books], tmp_path / "out", vocab_size=270)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="link is no folder but a link to .*out"):
        prepare([books], tmp_path / "link", vocab_size=280, overwrite=True)
    with pytest.raises(ValueError, match="has no intact .depthdial.json"):
        prepare([books], byte_base, vocab_size=280, overwrite=True)
    assert tree(tmp_path) == before and (byte_base / "model.safetensors").is_file()


def test_f21_a_second_prepare_into_one_folder_is_refused(books, tmp_path, monkeypatch):
    """At once, before it has read its input."""
    refused = []

    def second(*args):
        with pytest.raises(InUseError, match="out is in use by this process") as error:
            prepare([books], tmp_path / "out", vocab_size=270)
        refused.append(error)
        return write_splits(*args)

    write_splits = text._write_splits
    monkeypatch.setattr(text, "_write_splits", second)
    prepare([books], tmp_path / "out", vocab_size=270)
    assert refused and sorted(path.name for path in tmp_path.iterdir()) == ["books", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk_loses_nothing_and_leaves_no_half_folder(books, tmp_path, monkeypatch, overwrite):
    if overwrite:
        prepare([books], tmp_path / "out", vocab_size=270)
    before = contents(tmp_path / "out") if overwrite else None
    calls = []

    def add_then_fail(self, name, ids, *, num_bytes):
        calls.append(name)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SplitWriter, "add", add_then_fail)
    stands = "What was there is unchanged" if overwrite else "Nothing was left there"
    with pytest.raises(OSError, match=f"could not write .*out: No space left.*{stands}.*Make room"):
        prepare([books], tmp_path / "out", vocab_size=280, overwrite=overwrite)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == (["books", "out"] if overwrite else ["books"])
    if overwrite:
        assert contents(tmp_path / "out") == before


def test_vocabulary_beyond_the_text_is_refused(tmp_path, books):
    with pytest.raises(ValueError, match="supports only"):
        prepare([books], tmp_path / "out", vocab_size=5000)


def test_tokenizer_without_end_of_text_is_refused(books, tmp_path):
    from depthdial.data.synthetic import pointer_tokenizer

    with pytest.raises(ValueError, match="no end-of-text token"):
        prepare([books], tmp_path / "out", tokenizer=pointer_tokenizer())


def test_saved_tokenizer_equals_training_on_the_train_split(books, tmp_path):
    prepare([books], tmp_path / "out", vocab_size=270)
    names = [f"books/{path.name}" for path in sorted(books.iterdir())]
    valid = split_by_hash(names, valid_frac=0.05)
    texts = [(tmp_path / name).read_text() for name in names if name not in valid]
    assert Tokenizer.from_dir(tmp_path / "out").to_json() == train_bpe(texts, 270).to_json()


def test_f11_a_document_that_the_tokenizer_cannot_spell_is_named(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    words = Tokenizer(Backend(models.WordLevel({"known": 0, "<|endoftext|>": 1}, unk_token="?")))
    rows = [{"text": "known"}] * 3 + [{"text": "strange"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(ValueError, match="document 'a.jsonl:4': this tokenizer of 2 tokens cannot"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=words)


def test_f32_a_large_text_file_is_prepared_as_a_small_one(tmp_path, monkeypatch):
    """Cut at the same place, with the same tokenizer and the same tokens."""
    text = "".join(f"line number {i:04d} of\n" + "\n" * (i % 7 == 0) for i in range(400))
    (tmp_path / "a.txt").write_text(text + "caf\u00e9 \u4e2d\u6587 " * 50, encoding="utf-8")
    first = prepare([tmp_path / "a.txt"], tmp_path / "whole", vocab_size=280, valid_frac=0.1)
    monkeypatch.setattr("depthdial.data.documents.PART_BYTES", 100)
    for module in ("text", "tokenizer", "long_text"):
        monkeypatch.setattr(f"depthdial.data.{module}.WINDOW_CHARS", 500)
    monkeypatch.setattr("depthdial.data.long_text.OVERLAP_CHARS", 80)
    second = prepare([tmp_path / "a.txt"], tmp_path / "parts", vocab_size=280, valid_frac=0.1)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert (first.tokens, first.num_bytes) == (second.tokens, second.num_bytes)


@pytest.mark.parametrize("part", [1, 2, 3, 5, 64])
@given(
    text=st.text(st.sampled_from("ab \n"), min_size=1, max_size=80),
    frac=st.sampled_from([0.05, 0.3, 0.9]),
)
def test_f32_where_a_document_is_cut_does_not_depend_on_its_parts(part, text, frac):
    wanted = round(len(text) * (1 - frac))
    earliest = max(0, wanted - len(text) // 20)
    for mark in ("\n\n", "\n", " "):
        if (place := text.rfind(mark, earliest, wanted)) > 0:
            wanted = place + len(mark)
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthdial.data.documents.PART_BYTES", part)
        assert _cutting_place(Document("a", text), frac) == wanted


MEASURED = """
import json, re, sys
from pathlib import Path
from depthdial.data import documents, long_text, text, tokenizer
folder = Path(sys.argv[1])
for module in (text, tokenizer, long_text):
    module.WINDOW_CHARS = 40_000
documents.PART_BYTES = 100_000
byte_tokenizer, peaks = tokenizer.train_bpe([""], 257), []
for name in ("small.txt", "large.txt", "large.jsonl"):
    text.prepare([folder / name], folder / f"{name} out", tokenizer=byte_tokenizer)
    # Not getrusage: its peak is also that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    peaks.append(int(re.search(r"VmHWM:\\s*(\\d+)", status)[1]) * 1024)
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_f32_memory_does_not_grow_with_the_length_of_a_document(tmp_path):
    """Each byte of a document took ninety and more bytes: 5.5 GB for one of 60 MB."""
    line = "The ship sailed days past the island of birds. "
    (tmp_path / "small.txt").write_text(line * 4_000)
    (tmp_path / "large.txt").write_text(line * 12_000)
    (tmp_path / "large.jsonl").write_text(json.dumps({"text": line * 12_000}))
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large, row = json.loads(done.stdout)
    added = len(line) * 8_000
    # A row of jsonl is there as bytes, as text, and as the value in it.
    assert large - small < 16 * added and row - large < 16 * added, done.stdout
