"""The Python front door on a real, really tiny run: open, generate, sweep, recipes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import depthdial
from depthdial.api import Model, load_recipe, model_folder, recipe_names, token_documents
from depthdial.config import Recipe
from depthdial.data.text import prepare

TEXTS = [f"Chapter {i}. The ship sailed {i} days past the island of birds. " * 12 for i in range(9)]
TINY = {
    "model.vocab_size": 300,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.d_ff": 32,
    "model.max_context": 48,
    "model.max_loops": 3,
    "model.num_loops": 2,
    "model.modulation": {"d_cond": 8, "rank": 4, "embed_dim": 8},
    "data.context": 16,
    "train.batch_size": 8,
    "train.steps": 4,
    "train.val_every": 4,
    "train.val_rows": 4,
    "train.checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, the prepared folder `prepared`, and the run `runs/tiny` with two checkpoints."""
    root = tmp_path_factory.mktemp("api")
    (root / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare([root / "texts"], root / "prepared", vocab_size=300, valid_frac=0.3)
    overrides = TINY | {"data.path": str(root / "prepared"), "name": "tiny"}
    result = depthdial.train("tiny-text", root=root / "runs", **overrides)
    assert (result.status, result.step) == ("finished", 4)
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return depthdial.load(folder / "runs" / "tiny")


@pytest.fixture
def damaged_run(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run whose newest checkpoint lost its last byte."""
    run = tmp_path / "damaged"
    shutil.copytree(folder / "runs" / "tiny", run)
    weights = run / "checkpoints" / "step_4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    yield run


class TestLoad:
    def test_a_run_is_its_newest_checkpoint(self, folder: Path) -> None:
        assert model_folder(folder / "runs" / "tiny").name == "step_4"

    def test_a_checkpoint_folder_is_that_checkpoint(self, folder: Path) -> None:
        checkpoint = folder / "runs" / "tiny" / "checkpoints" / "step_2"
        assert model_folder(checkpoint) == checkpoint

    def test_a_damaged_newest_checkpoint_falls_back_and_names_the_previous(
        self, damaged_run: Path
    ) -> None:
        with pytest.warns(UserWarning, match=r"step_4 is skipped: .* Using step_2 instead"):
            assert model_folder(damaged_run).name == "step_2"

    def test_a_damaged_checkpoint_given_by_its_path_is_refused(self, damaged_run: Path) -> None:
        with pytest.raises(ValueError, match="step_4 cannot be used: 'model.safetensors' has"):
            depthdial.load(damaged_run / "checkpoints" / "step_4")

    def test_a_mistyped_path_gets_the_nearest_name(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no model at .*tinny\. Did you mean .*/tiny'"):
            depthdial.load(folder / "runs" / "tinny")

    def test_a_hub_id_without_network_says_so_and_what_to_do(self) -> None:
        with pytest.raises(FileNotFoundError, match="(?s)as a hub id .* give the path of a model"):
            depthdial.load("nobody-depthdial/no-such-model")

    def test_a_folder_that_is_no_model_is_refused(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"is not a model directory"):
            depthdial.load(folder / "texts")


class TestGenerate:
    def test_one_prompt_gives_a_list_of_one(self, model: Model) -> None:
        [completion] = model.generate("The ship", max_new_tokens=5)
        assert completion.num_loops == model.config.num_loops == 2
        assert completion.finish_reason == "length"
        assert completion.completion_tokens == 5
        assert completion.prompt_tokens == len(model.tokenizer.encode("The ship"))

    def test_a_batch_equals_each_prompt_alone_at_its_own_loop_count(self, model: Model) -> None:
        prompts, loops = ["The ship", "Chapter", "island of"], [3, 1, 2]
        together = model.generate(prompts, num_loops=loops, max_new_tokens=8)
        alone = [
            model.generate(prompt, num_loops=k, max_new_tokens=8)[0]
            for prompt, k in zip(prompts, loops, strict=True)
        ]
        assert together == alone

    def test_equal_seeds_give_equal_text_and_others_do_not(self, model: Model) -> None:
        first, again, other = (
            model.generate("The", temperature=1.0, seed=seed, max_new_tokens=20)[0].text
            for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_a_stop_text_ends_the_text_and_is_cut_off(self, model: Model) -> None:
        whole = model.generate("The ship", temperature=1.0, max_new_tokens=20)[0].text
        stop = whole[4:7]
        [cut] = model.generate("The ship", temperature=1.0, max_new_tokens=20, stop=stop)
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason == "stop"

    def test_an_empty_stop_text_is_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="a stop text is empty"):
            model.generate("The", stop=["", "x"])

    def test_an_empty_prompt_is_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            model.generate("")

    @pytest.mark.parametrize("num_loops", [0, 2.5, "2", True])
    def test_a_loop_count_below_one_or_not_whole_is_refused(
        self, model: Model, num_loops: object
    ) -> None:
        with pytest.raises(ValueError, match=r"num_loops.*give an int >= 1"):
            model.generate("The", num_loops=num_loops)

    def test_more_loops_than_trained_are_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="num_loops=4 exceeds max_loops=3"):
            model.generate("The", num_loops=4)


class TestSweep:
    def test_texts_files_and_a_folder_of_files_give_the_same_losses(
        self, folder: Path, model: Model
    ) -> None:
        files = sorted((folder / "texts").iterdir())
        by_text = depthdial.sweep(model, TEXTS, loops=[1, 2])
        by_file = depthdial.sweep(model, files, loops=[1, 2])
        by_folder = depthdial.sweep(model, folder / "texts", loops=[1, 2])
        np.testing.assert_array_equal(by_text.nll_KN, by_file.nll_KN)
        np.testing.assert_array_equal(by_file.nll_KN, by_folder.nll_KN)

    def test_a_prepared_folder_means_its_validation_documents(
        self, folder: Path, model: Model
    ) -> None:
        sweep = depthdial.sweep(model, folder / "prepared", loops=[1])
        assert 0 < len(sweep.names) < len(TEXTS)
        by_name = dict(zip(sweep.names, sweep.nll(1), strict=True))
        texts = [(folder / name).read_text(encoding="utf-8") for name in sweep.names]
        np.testing.assert_allclose(
            depthdial.sweep(model, texts, loops=[1]).nll(1), list(by_name.values()), rtol=1e-6
        )

    def test_b15_loop_counts_beyond_training_are_swept_and_marked(self, model: Model) -> None:
        sweep = depthdial.sweep(model, TEXTS[:2])
        assert sweep.loops == (1, 2, 3, 4, 5)
        assert [k for k in sweep.loops if not sweep.is_trained(k)] == [4, 5]

    def test_a_path_of_a_run_stands_for_its_model(self, folder: Path, model: Model) -> None:
        by_path = depthdial.sweep(str(folder / "runs" / "tiny"), TEXTS[:2], loops=[2])
        assert by_path.mean_loss(2) == depthdial.sweep(model, TEXTS[:2], loops=[2]).mean_loss(2)

    def test_b23_empty_documents_are_skipped_and_counted(self, model: Model) -> None:
        with pytest.warns(UserWarning, match="skipped 2 of 3 documents: no text"):
            sweep = depthdial.sweep(model, ["The ship", "", " \n"], loops=[1])
        assert sweep.names == ("text 1",)

    def test_only_empty_documents_are_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="all 2 documents are empty"):
            depthdial.sweep(model, ["", " "])

    def test_text_shorter_than_the_context_is_scored_whole(self, model: Model) -> None:
        sweep = depthdial.sweep(model, ["The ship"], loops=[1], context=48)
        assert sweep.tokens_N.tolist() == [len(model.tokenizer.encode("The ship")) + 1]

    def test_ids_of_another_tokenizer_are_refused(self, folder: Path, model: Model) -> None:
        prepare([folder / "texts"], folder / "other", vocab_size=280)
        with pytest.raises(ValueError, match="prepared with another tokenizer"):
            depthdial.sweep(model, folder / "other")

    def test_a_file_name_among_texts_is_refused(self, folder: Path, model: Model) -> None:
        name = str(folder / "texts" / "0.txt")
        with pytest.raises(ValueError, match=r"name of a file; strings in a list are texts"):
            depthdial.sweep(model, [name])

    def test_documents_end_with_the_end_of_text_token(self, model: Model) -> None:
        [document] = token_documents(["The ship"], model.tokenizer)
        assert document.tokens_T[-1] == model.tokenizer.eos_id
        assert document.num_bytes == len("The ship")


class TestRecipes:
    @pytest.mark.parametrize("name", recipe_names())
    def test_every_shipped_recipe_is_valid_and_named_as_its_file(self, name: str) -> None:
        assert load_recipe(name).name == name

    @pytest.mark.parametrize("name", ["tiny-text", "tiny-pointer"])
    def test_a_baseline_differs_from_its_recipe_only_in_what_loops(self, name: str) -> None:
        looped, baseline = load_recipe(name), load_recipe(f"{name}-baseline")
        plain = {
            "model.loop.update": "replace",
            "model.max_loops": 1,
            "model.num_loops": 1,
            "model.modulation": None,
            "depth": baseline.depth,
            "name": baseline.name,
        }
        assert looped.replace(**plain) == baseline
        assert baseline.depth.sampler == "fixed" and baseline.depth.fixed_loops == 1

    def test_an_unknown_name_gets_the_nearest_one(self) -> None:
        with pytest.raises(ValueError, match="Did you mean 'tiny-text'"):
            load_recipe("tiny-txt")

    def test_an_unknown_key_gets_the_nearest_one(self) -> None:
        with pytest.raises(ValueError, match=r"unknown key 'model.loop.updat'. Did you mean"):
            load_recipe("tiny-text", {"model.loop.updat": "delta"})

    def test_naming_a_source_of_data_replaces_the_one_of_the_recipe(self) -> None:
        data = load_recipe("tiny-text", {"data.path": "mine"}).data
        assert (data.path, data.corpus, data.tokenizer_vocab) == ("mine", None, None)

    def test_two_named_sources_of_data_are_refused(self) -> None:
        with pytest.raises(ValueError, match="exactly one of path, corpus, task"):
            load_recipe("tiny-text", {"data.path": "mine", "data.task": "pointer_program"})

    def test_another_corpus_keeps_the_size_of_the_vocabulary(self) -> None:
        data = load_recipe("tiny-text", {"data.corpus": "stdlib"}).data
        assert (data.corpus, data.tokenizer_vocab) == ("stdlib", 1024)

    def test_a_split_that_does_not_add_up_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"split \[2, 4, 1\] adds up to 7 sublayers"):
            load_recipe("tiny-text", {"model.split": [2, 4, 1]})

    def test_a_missing_file_is_told_apart_from_an_unknown_name(self) -> None:
        with pytest.raises(FileNotFoundError, match="no recipe file at mine.yaml"):
            load_recipe("mine.yaml")

    def test_a_recipe_file_and_a_recipe_object_are_taken(self, tmp_path: Path) -> None:
        recipe = load_recipe("tiny-text", {"train.steps": 7})
        path = tmp_path / "mine.json"
        path.write_text(recipe.to_json(), encoding="utf-8")
        assert load_recipe(path) == load_recipe(str(path)) == load_recipe(recipe) == recipe

    def test_overrides_of_train_are_keys_with_double_underscores(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="unknown key 'train.stepps'. Did you mean 'steps'"):
            depthdial.train("tiny-text", root=tmp_path, train__stepps=3)

    def test_the_run_records_the_overridden_recipe(self, folder: Path) -> None:
        recipe = Recipe.from_file(folder / "runs" / "tiny" / "config.json")
        assert recipe.train.steps == 4
        assert recipe.data.path == str(folder / "prepared")
