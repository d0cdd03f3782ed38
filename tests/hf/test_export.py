"""`export --as hf`: a folder that transformers opens where this package is not installed."""

import json
import subprocess
import sys
import textwrap

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN
from toys import toy_model, toy_tokens

from depthdial.convert.convert import convert
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.disk import RECORD_FILE
from depthdial.formats.hf_export import AUTO_MAP, code_files, export_hf
from depthdial.formats.import_export import import_checkpoint
from depthdial.model.checkpoint import load_model, save_model

TEXT = "citizens of the"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model folder of ours with a tokenizer and a licence."""
    folder = tmp_path_factory.mktemp("source") / "model"
    tokenizer = train_bpe(["Fellow citizens of the Senate. " * 20], 270, allow_fewer=True)
    save_model(toy_model(vocab_size=tokenizer.vocab_size, tie_embeddings=True), folder)
    tokenizer.save(folder)
    (folder / "LICENSE").write_text("terms")
    return folder


@pytest.fixture(scope="module")
def exported(source):
    """The export of `source`."""
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    export_hf(source, source.parent / "exported")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    return source.parent / "exported"


NOT_INSTALLED = """
import json, os, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "depthdial":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
import torch
torch.set_num_threads(1)
"""
STRANGER = """
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder, result, text = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
inputs = tokenizer(text, return_tensors="pt")
settings = {"num_loops": 3, "max_new_tokens": 6, "do_sample": False}
with torch.no_grad():
    out = model(**inputs, num_loops=3, output_hidden_states=True)
texts = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **settings)
for name in ("1", "2", "3"):
    model.save_pretrained(os.path.join(result, name))
    model = AutoModelForCausalLM.from_pretrained(
        os.path.join(result, name), trust_remote_code=True
    )
torch.save(out.logits, os.path.join(result, "logits.pt"))
found = {
    "ids": inputs["input_ids"][0].tolist(),
    "states": len(out.hidden_states),
    "tokens": model.generate(**inputs, **settings)[0].tolist(),
    "uncached": model.generate(**inputs, **settings, use_cache=False)[0].tolist(),
    "text": texts[0]["generated_text"],
    "stops": model.generation_config.eos_token_id,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def stranger(exported, tmp_path_factory):
    """What a process finds in which no module of this package can be imported."""
    result = tmp_path_factory.mktemp("stranger")
    return result, run_without_package(STRANGER, exported, result, TEXT, place=result)


def run_without_package(code, *arguments, place):
    """What a process prints last, as JSON."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOT_INSTALLED + code), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=place,
        env={
            "HF_MODULES_CACHE": str(place / "modules"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_stranger_gets_our_logits_and_states(source, stranger):
    result, found = stranger
    model = toy_model(vocab_size=Tokenizer.from_dir(source).vocab_size, tie_embeddings=True)
    expected = model(torch.tensor([found["ids"]]), num_loops=3)
    actual = torch.load(result / "logits.pt", weights_only=True)
    assert torch.allclose(actual, expected, atol=1e-5)
    assert found["states"] == 5


def test_a_stranger_generates_with_a_cache_as_without(stranger):
    _, found = stranger
    assert found["tokens"] == found["uncached"]
    assert len(found["tokens"]) == len(found["ids"]) + 6


def test_a_stranger_opens_and_ends_a_text_as_the_model_was_trained(source, stranger):
    _, found = stranger
    tokenizer = Tokenizer.from_dir(source)
    assert found["ids"] == [*tokenizer.opening_ids, *tokenizer.encode(TEXT)]
    assert found["stops"] == list(tokenizer.stop_ids)
    assert found["text"].startswith(TEXT)


def test_b36_three_rounds_of_a_stranger_keep_config_weights_and_code(exported, stranger):
    result, _ = stranger
    names = ("config.json", "model.safetensors", *code_files())
    for name in names:
        wanted = (exported / name).read_bytes()
        assert all((result / round_ / name).read_bytes() == wanted for round_ in ("1", "2", "3"))


TOKENIZER_OF_A_STRANGER = """
import builtins
from transformers import AutoTokenizer, PreTrainedTokenizerFast
asked = []
def no_answer(question):
    asked.append(question)
    raise EOFError
builtins.input = no_answer
folder, text = sys.argv[1:]
found = {}
for name, tokenizer in (
    ("of the card", lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False)),
    ("by its class", lambda: PreTrainedTokenizerFast.from_pretrained(folder)),
    ("unanswered", lambda: AutoTokenizer.from_pretrained(folder)),
):
    found[name] = [tokenizer()(text)["input_ids"], len(asked)]
print(json.dumps(found))
"""


def test_f08_the_tokenizer_of_an_export_needs_no_question_and_no_code(source, exported, tmp_path):
    """transformers reads config.json first, and asks whether its code may run."""
    tokenizer = Tokenizer.from_dir(source)
    ids = [*tokenizer.opening_ids, *tokenizer.encode(TEXT)]
    found = run_without_package(TOKENIZER_OF_A_STRANGER, exported, TEXT, place=tmp_path)
    assert found["of the card"] == found["by its class"] == [ids, 0]
    assert found["unanswered"][0] == ids
    assert not list((tmp_path / "modules").rglob("*depthdial*"))
    assert (
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=False)"
        in (exported / "README.md").read_text()
    )


def test_f08_with_the_package_the_tokenizer_needs_no_question(exported, monkeypatch):
    from transformers import AutoTokenizer

    def asked(question):
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", asked)
    assert AutoTokenizer.from_pretrained(exported)(TEXT)["input_ids"]


STRANGER_OF_ANY = """
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        logits = model(tokens, num_loops=2, use_cache=True).logits
    new = {"num_loops": 2, "max_new_tokens": 4, "do_sample": False}
    found[os.path.basename(folder)] = {
        "logits": logits[0].tolist(),
        "cached": model.generate(tokens, **new)[0].tolist(),
        "uncached": model.generate(tokens, **new, use_cache=False)[0].tolist(),
    }
print(json.dumps(found))
"""


def test_a_stranger_gets_our_logits_of_every_kind_of_conditioning(tmp_path):
    """transformers loads the config's classes twice; comparing them by class built another model,
    or none.
    """
    import_checkpoint(GOLDEN / "loopformer", tmp_path / "time")
    convert(tmp_path / "time", tmp_path / "gated", method="elastic-fixed")
    save_model(toy_model(), tmp_path / "loops")
    exports = [tmp_path / "exports" / name for name in ("time", "gated", "loops")]
    for folder in exports:
        export_hf(tmp_path / folder.name, folder)
    found = run_without_package(STRANGER_OF_ANY, *exports, place=tmp_path)
    for name, answer in found.items():
        expected = load_model(tmp_path / name)(torch.arange(5)[None], num_loops=2)[0]
        assert torch.allclose(torch.tensor(answer["logits"]), expected, atol=1e-5), name
        assert answer["cached"] == answer["uncached"], name


def test_b34_the_weights_are_the_folders_own_file(source, exported):
    name = "model.safetensors"
    assert (exported / name).read_bytes() == (source / name).read_bytes()
    assert "lm_head.weight" not in safetensors.torch.load_file(exported / name)


def test_the_config_is_ours_and_names_the_code(source, exported):
    values = json.loads((exported / "config.json").read_text())
    assert values.pop("auto_map") == AUTO_MAP
    assert values == json.loads((source / "config.json").read_text())


def test_the_code_is_flat_and_imports_nothing_of_this_package():
    files = code_files()
    for name, text in files.items():
        compile(text, name, "exec")
        assert "from depthdial" not in text.replace("# From depthdial", "")
        assert "import depthdial" not in text
    assert "configuration_depthdial.py" in files and "modeling_depthdial.py" in files


def test_the_card_says_how_to_open_it_and_the_licence_comes_along(exported):
    card = (exported / "README.md").read_text()
    assert "trust_remote_code=True" in card and "pydantic" in card
    assert (exported / "LICENSE").read_text() == "terms"


def test_a_model_without_tokenizer_is_exported_too(tmp_path):
    save_model(toy_model(), tmp_path / "model")
    report = export_hf(tmp_path / "model", tmp_path / "exported")
    assert not (tmp_path / "exported" / "tokenizer.json").exists()
    stored = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    assert report.num_tensors == len(stored)
    assert report.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert set(report.files) == names - {RECORD_FILE}


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.full((32,), float("nan")), "'final_norm.weight' has nan at place 0 of 32"),
        (torch.ones(31), "'final_norm.weight' has shape .31., the config asks for shape .32."),
    ],
)
def test_a_damaged_model_is_refused_by_the_tensors_name(tmp_path, value, match):
    """NaN was copied into the export."""
    save_model(toy_model(), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = {name: t.clone() for name, t in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(tensors | {"final_norm.weight": value}, weights)
    with pytest.raises(ValueError, match=match):
        export_hf(tmp_path / "model", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_taken_destination_is_left_alone(source, exported):
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_hf(source, exported)
    with pytest.raises(ValueError, match="lie in one another"):
        export_hf(source, source / "inside")


def test_the_installed_package_opens_an_export_with_its_own_code(exported):
    from transformers import AutoModelForCausalLM

    import depthdial.hf

    model = AutoModelForCausalLM.from_pretrained(exported)
    assert type(model) is depthdial.hf.DepthdialForCausalLM
    assert model(toy_tokens(1, 4)).logits.shape[1] == 4


def test_a_copy_saved_by_the_installed_package_says_that_it_has_no_code(exported, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported)
    with pytest.warns(UserWarning, match="copy gets neither the code nor the auto_map of"):
        model.save_pretrained(tmp_path / "copy")
    assert "auto_map" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    assert load_model(tmp_path / "copy").config == model.config.looped


def test_a_model_of_our_own_is_saved_without_a_warning(source, tmp_path, recwarn):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "copy")
    assert not [w for w in recwarn if "auto_map" in str(w.message)]
