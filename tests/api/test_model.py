"""The Python front door on a real, really tiny run: open, generate, sweep, recipes."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import depthdial
from depthdial.api.data import token_documents
from depthdial.api.model import Model, load_recipe, model_folder
from depthdial.config import LoopConfig, ModelConfig, ModulationConfig, Recipe
from depthdial.convert.convert import convert
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenDocument
from depthdial.data.synthetic import PointerPrograms, pointer_tokenizer
from depthdial.data.text import prepare
from depthdial.data.tokenizer import train_bpe
from depthdial.engine.generate import generate
from depthdial.eval.depth_sweep import POINTER_ROWS, sweep_documents
from depthdial.model.checkpoint import read_config, read_tensors, save_model
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.presets import preset
from depthdial.recipes import needs_init, recipe_file, recipe_names


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> Model:
    return depthdial.load(tiny_run)


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory, tiny_texts: list[str]) -> Path:
    """A dense model made elastic; `data` beside it is text prepared with its tokenizer."""
    root = tmp_path_factory.mktemp("elastic")
    config = ModelConfig(
        vocab_size=257, d_model=16, split=(2, 4, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=32, max_context=128, num_loops=1, max_loops=1, tie_embeddings=True,
        loop=LoopConfig(update="replace"),
    )  # fmt: skip
    save_model(LoopedLM(config, seed=0), root / "dense")
    tokenizer = train_bpe(tiny_texts, 257)
    tokenizer.save(root / "dense")
    (root / "texts").mkdir()
    for number, text in enumerate(tiny_texts):
        (root / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare([root / "texts"], root / "data", tokenizer=tokenizer, valid_frac=0.3)
    convert(
        root / "dense", root / "elastic", method="joint-deltas", core="1:3", options={"rank": 2},
        texts=root / "texts",
    )  # fmt: skip
    return root / "elastic"


@pytest.fixture
def damaged_run(tiny_run: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run whose newest checkpoint lost its last byte."""
    run = tmp_path / "damaged"
    shutil.copytree(tiny_run, run)
    weights = run / "checkpoints" / "step_4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    yield run


class TestLoad:
    def test_a_run_is_its_newest_checkpoint(self, tiny_run: Path) -> None:
        assert model_folder(tiny_run).name == "step_4"

    def test_a_checkpoint_folder_is_that_checkpoint(self, tiny_run: Path) -> None:
        checkpoint = tiny_run / "checkpoints" / "step_2"
        assert model_folder(checkpoint) == checkpoint

    def test_a_damaged_newest_checkpoint_falls_back_and_names_the_previous(
        self, damaged_run: Path
    ) -> None:
        with pytest.warns(UserWarning, match=r"step_4 is skipped: .* Using step_2 instead"):
            assert model_folder(damaged_run).name == "step_2"

    def test_a_damaged_checkpoint_given_by_its_path_is_refused(self, damaged_run: Path) -> None:
        with pytest.raises(ValueError, match="step_4 cannot be used: 'model.safetensors' has"):
            depthdial.load(damaged_run / "checkpoints" / "step_4")

    def test_a_mistyped_path_gets_the_nearest_name(self, tiny_folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no model at .*tinny\. Did you mean .*/tiny'"):
            depthdial.load(tiny_folder / "runs" / "tinny")

    def test_a_hub_id_without_network_says_so_and_what_to_do(self) -> None:
        with pytest.raises(FileNotFoundError, match="(?s)as a hub id .* give the path of a model"):
            depthdial.load("nobody-depthdial/no-such-model")

    def test_a_device_that_is_not_there_is_refused_with_those_that_are(
        self, tiny_run: Path
    ) -> None:
        with pytest.raises(ValueError, match="device 'nowhere' cannot be used .* Available: cpu"):
            depthdial.load(tiny_run, device="nowhere")

    def test_a_folder_that_is_no_model_is_refused(self, tiny_folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"is not a model directory"):
            depthdial.load(tiny_folder / "texts")


class TestGenerate:
    def test_one_prompt_gives_a_list_of_one(self, model: Model) -> None:
        [completion] = model.generate("The ship", max_new_tokens=5)
        assert completion.num_loops == model.config.num_loops == 2
        assert completion.finish_reason == "length"
        assert completion.completion_tokens == 5

    def test_a_prompt_follows_the_end_of_text_token_that_opens_a_document(
        self, model: Model
    ) -> None:
        ids = [model.tokenizer.eos_id, *model.tokenizer.encode("The ship")]
        [expected] = generate(model.looped_lm, [ids], num_loops=2, max_new_tokens=8)
        [completion] = model.generate("The ship", num_loops=2, max_new_tokens=8)
        assert completion.text == model.tokenizer.decode(expected.token_ids)
        assert completion.prompt_tokens == len(ids)

    def test_what_is_generated_continues_what_a_sweep_scores(self, model: Model) -> None:
        """The greedy first token is the likeliest of all as the next token of the document."""
        [completion] = model.generate("The ship", num_loops=2, max_new_tokens=1)
        start = len(model.tokenizer.encode("The ship"))
        losses = []
        for token in range(model.tokenizer.vocab_size):
            ids = [*model.tokenizer.encode("The ship"), token]
            document = TokenDocument("one", np.array(ids), 1)
            whole = sweep_documents(
                model.looped_lm, [document], loops=[2], context=48, start_id=model.tokenizer.eos_id
            )
            losses.append(whole.nll_KN[0, 0])
        assert start + 1 == completion.prompt_tokens
        assert model.tokenizer.decode([int(np.argmin(losses))]) == completion.text

    def test_texts_know_the_bytes_of_their_first_token(self, model: Model) -> None:
        text = "The ship sailed"
        [document] = token_documents([text], model.tokenizer)
        first = model.tokenizer.decode([model.tokenizer.encode(text)[0]])
        assert (document.num_bytes, document.first_bytes) == (len(text), len(first))

    def test_a_tokenizer_without_end_of_text_adds_nothing_to_a_prompt(self) -> None:
        pointer = Model(LoopedLM(preset("tiny-pointer"), seed=0), pointer_tokenizer())
        [completion] = pointer.generate("c5 r1f2 c1", max_new_tokens=2)
        assert completion.prompt_tokens == 3

    def test_without_a_limit_the_opened_prompt_leaves_room_in_the_context(
        self, model: Model
    ) -> None:
        ids = model.tokenizer.encode("The ship sailed past the island of birds. " * 9)[:45]
        text = model.tokenizer.decode(ids)
        assert len(model.tokenizer.encode(text)) == 45
        [completion] = model.generate(text)
        assert (completion.prompt_tokens, completion.completion_tokens) == (46, 2)

    def test_the_end_of_text_token_counts_against_the_context(self, model: Model) -> None:
        with pytest.raises(ValueError, match="prompt 0 has 46 tokens and asks for 3 more"):
            text = "The ship sailed past the island of birds. " * 9
            ids = model.tokenizer.encode(text)[:45]
            model.generate(model.tokenizer.decode(ids), max_new_tokens=3)

    def test_a_batch_equals_each_prompt_alone_at_its_own_loop_count(self, model: Model) -> None:
        prompts, loops = ["The ship", "Chapter", "island of"], [3, 1, 2]
        together = model.generate(prompts, num_loops=loops, max_new_tokens=8)
        alone = [
            model.generate(prompt, num_loops=k, max_new_tokens=8)[0]
            for prompt, k in zip(prompts, loops, strict=True)
        ]
        assert together == alone

    @pytest.mark.filterwarnings("ignore:the loops of this model depend")
    def test_an_exit_rule_ends_the_loops_of_each_token(self, model: Model) -> None:
        """A rule that never stops gives the plain text; one that always does, one loop a token."""
        settings = {"num_loops": 3, "max_new_tokens": 5}
        [plain] = model.generate("The ship", **settings)
        [never] = model.generate(
            "The ship", exit_rule="latent_diff", exit_threshold=1e-30, **settings
        )
        [always] = model.generate("The ship", exit_rule="latent_diff", exit_threshold=9, **settings)
        assert (plain.mean_loops, never.mean_loops) == (None, 3)
        assert never.text == plain.text
        assert always.mean_loops == pytest.approx((3 + 4) / 5)

    def test_an_exit_threshold_needs_a_rule(self, model: Model) -> None:
        with pytest.raises(ValueError, match="exit_threshold=0.1 has no effect without"):
            model.generate("The ship", exit_threshold=0.1)

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

    def test_no_token_is_generated_after_a_stop_text(self, model: Model) -> None:
        """The count ends with the token that completes the stop text."""
        settings = {"temperature": 1.0, "max_new_tokens": 20}
        whole = model.generate("The ship", **settings)[0].text
        [cut] = model.generate("The ship", stop=whole[4:7], **settings)
        least = next(
            count
            for count in range(1, 21)
            if whole[4:7]
            in model.generate("The ship", temperature=1.0, max_new_tokens=count)[0].text
        )
        assert cut.completion_tokens == least < 20

    def test_weights_that_are_no_numbers_are_refused(self, model: Model) -> None:
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken.looped_lm.embedding.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="scores that are no finite numbers"):
            broken.generate("The")

    def test_an_empty_stop_text_is_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="a stop text is empty"):
            model.generate("The", stop=["", "x"])

    def test_an_empty_prompt_is_refused(self, model: Model) -> None:
        with pytest.raises(ValueError, match="prompt 1 is empty; give at least one character"):
            model.generate(["The", ""])

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
    @pytest.mark.parametrize("context", [0, 49])
    def test_a_context_outside_the_model_is_refused(self, model: Model, context: int) -> None:
        with pytest.raises(ValueError, match=rf"context={context} .* give 1 to 48"):
            depthdial.sweep(model, ["some text"], context=context)

    def test_texts_without_text_are_told_in_plain_words(self, model: Model) -> None:
        with pytest.raises(ValueError, match="nothing to measure: the only document is empty"):
            depthdial.sweep(model, [" "])

    def test_texts_files_and_a_folder_of_files_give_the_same_losses(
        self, tiny_folder: Path, model: Model, tiny_texts: list[str]
    ) -> None:
        files = sorted((tiny_folder / "texts").iterdir())
        by_text = depthdial.sweep(model, tiny_texts, loops=[1, 2])
        by_file = depthdial.sweep(model, files, loops=[1, 2])
        by_folder = depthdial.sweep(model, tiny_folder / "texts", loops=[1, 2])
        np.testing.assert_array_equal(by_text.nll_KN, by_file.nll_KN)
        np.testing.assert_array_equal(by_file.nll_KN, by_folder.nll_KN)

    def test_a_prepared_folder_means_its_validation_documents(
        self, tiny_folder: Path, model: Model, tiny_texts: list[str]
    ) -> None:
        sweep = depthdial.sweep(model, tiny_folder / "data", loops=[1])
        assert 0 < len(sweep.names) < len(tiny_texts)
        by_name = dict(zip(sweep.names, sweep.nll(1), strict=True))
        texts = [(tiny_folder / name).read_text(encoding="utf-8") for name in sweep.names]
        np.testing.assert_allclose(
            depthdial.sweep(model, texts, loops=[1]).nll(1), list(by_name.values()), rtol=1e-6
        )

    def test_b15_loop_counts_beyond_training_are_swept_and_marked(
        self, model: Model, tiny_texts: list[str]
    ) -> None:
        sweep = depthdial.sweep(model, tiny_texts[:2])
        assert sweep.loops == (1, 2, 3, 4, 5)
        assert sweep.trained_loops == model.config.trained_at
        assert {4, 5}.isdisjoint(filter(sweep.is_trained, sweep.loops))

    def test_b15_a_checkpoint_tells_which_loop_counts_were_trained(
        self, tiny_folder: Path, tiny_texts: list[str], tmp_path: Path
    ) -> None:
        changes = {"depth.sampler": "fixed", "depth.fixed_loops": 3, "depth.override_frac": 0.0}
        recipe = Recipe.from_file(tiny_folder / "runs" / "tiny" / "config.json")
        changed = recipe.replace(name="fixed", **changes | {"depth.switch_frac": 0.5})
        often = {"train__checkpoint_every": 2, "train__keep_checkpoints": 3}
        run = depthdial.train(changed, root=tmp_path, **often).path
        texts = tiny_texts[:1]
        for path, trained in (
            (run, (1, 3)),
            (run / "checkpoints" / "step_2", (1,)),
            (run / "checkpoints" / "step_0", ()),
            (shutil.copytree(run / "checkpoints" / "step_4", tmp_path / "alone"), (1, 3)),
            (depthdial.load(run), (1, 3)),
        ):
            assert depthdial.sweep(path, texts, loops=[1, 2]).trained_loops == trained
        given = depthdial.sweep(depthdial.load(run), texts, loops=[1], trained_loops=[2])
        assert given.trained_loops == (2,)

    @pytest.mark.parametrize("name", ["context", "stride"])
    def test_an_option_of_text_is_refused_for_pointer_programs(self, name: str) -> None:
        model = Model(LoopedLM(preset("tiny-pointer"), seed=0), pointer_tokenizer())
        programs = PointerPrograms(0, context=32, split="valid")
        with pytest.raises(ValueError, match=f"{name}=8 has no effect on pointer programs"):
            depthdial.sweep(model, programs, **{name: 8})

    def test_pointer_programs_need_no_text(self) -> None:
        model = Model(LoopedLM(preset("tiny-pointer"), seed=0), pointer_tokenizer())
        programs = PointerPrograms(0, context=8, split="valid")
        sweep = depthdial.sweep(model, programs, loops=[1], rows_per_forward=512)
        assert len(sweep.names) == POINTER_ROWS
        assert sweep.correct_KNP is not None

    def test_pointer_chains_are_answered_with_digits_by_look_ups(
        self, chain_run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("depthdial.eval.depth_sweep.CHAIN_ROWS", 10)
        model = depthdial.load(chain_run)
        chains = PointerChains(model.tokenizer, 7, num_chains=1, chain_length=4, split="valid")
        sweep = depthdial.sweep(chain_run, chains, loops=[1, 2, 3])
        assert len(sweep.names) == 10 and sweep.trained_loops == (1, 2)
        assert sweep.total_NP is not None
        assert sweep.total_NP.tolist() == [[1, 1, 1, 1]] * 10

    def test_pointer_chains_that_do_not_fit_the_model_are_refused(
        self, chain_run: Path, model: Model
    ) -> None:
        tokenizer = depthdial.load(chain_run).tokenizer
        chains = PointerChains(tokenizer, 0, num_chains=2, chain_length=4)
        with pytest.raises(ValueError, match="rows of 56 tokens do not fit this model"):
            depthdial.sweep(chain_run, chains)
        with pytest.raises(
            ValueError, match="stride=4 has no effect on pointer chains: a row is 2"
        ):
            depthdial.sweep(chain_run, chains, stride=4)
        with pytest.raises(
            ValueError, match="written in 257 tokens, this model's tokenizer has 300"
        ):
            depthdial.sweep(model, chains)

    def test_a_path_of_a_run_stands_for_its_model(
        self, tiny_run: Path, model: Model, tiny_texts: list[str]
    ) -> None:
        by_path = depthdial.sweep(str(tiny_run), tiny_texts[:2], loops=[2])
        context = Recipe.from_file(tiny_run / "config.json").data.context
        by_model = depthdial.sweep(model, tiny_texts[:2], loops=[2], context=context)
        assert by_path.mean_loss(2) == by_model.mean_loss(2)

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

    def test_ids_of_another_tokenizer_are_refused(self, tiny_folder: Path, model: Model) -> None:
        prepare([tiny_folder / "texts"], tiny_folder / "other", vocab_size=280)
        with pytest.raises(ValueError, match="prepared with another tokenizer"):
            depthdial.sweep(model, tiny_folder / "other")

    def test_a_file_name_among_texts_is_refused(self, tiny_folder: Path, model: Model) -> None:
        name = str(tiny_folder / "texts" / "0.txt")
        with pytest.raises(ValueError, match=r"name of a file; strings in a list are texts"):
            depthdial.sweep(model, [name])

    def test_documents_end_with_the_end_of_text_token(self, model: Model) -> None:
        [document] = token_documents(["The ship"], model.tokenizer)
        assert document.tokens_T[-1] == model.tokenizer.eos_id
        assert document.num_bytes == len("The ship")


class TestRecipes:
    @pytest.mark.parametrize("name", recipe_names())
    def test_every_shipped_recipe_is_valid_and_named_as_its_file(
        self, name: str, elastic: Path
    ) -> None:
        changes = {"train.init": str(elastic)} if needs_init(recipe_file(name)) else {}
        assert load_recipe(name, changes).name == name

    def test_a_healing_recipe_takes_the_model_that_it_starts_from(self, elastic: Path) -> None:
        recipe = load_recipe("heal-text", {"train.init": str(elastic), "model.max_loops": 5})
        assert recipe.model == read_config(elastic).replace(max_loops=5, trained_loops=None)
        assert (recipe.optim.optimizer, recipe.optim.lr) == ("adamw", 1e-3)
        assert recipe.depth.listed_loops == (1, 1, 2, 2, 3, 4)
        assert (recipe.train.steps, recipe.train.batch_size, recipe.data.context) == (160, 4, 128)

    def test_a_healing_recipe_without_a_model_to_start_from_says_so(self) -> None:
        with pytest.raises(ValueError, match="missing key 'model'. .* name one with --init"):
            load_recipe("heal-text")

    def test_init_is_a_run_too_and_its_newest_checkpoint_is_taken(self, tiny_run: Path) -> None:
        changes = {"train.init": str(tiny_run), "data.context": 48}
        recipe = load_recipe("tiny-text", changes)
        assert recipe.train.init == str(tiny_run / "checkpoints" / "step_4")
        assert recipe.model.max_loops == 3
        assert load_recipe(recipe, {"train.init": str(tiny_run)}) == recipe

    def test_a_teacher_may_be_a_run_too(self, tiny_run: Path) -> None:
        distill = {"objective.distill.weight": 0.5, "objective.distill.teacher": str(tiny_run)}
        changes = distill | {"train.init": str(tiny_run), "data.context": 48}
        recipe = load_recipe("tiny-text", changes)
        assert recipe.objective.distill.teacher == str(tiny_run / "checkpoints" / "step_4")

    def test_everything_changes_before_a_file_is_checked_against_the_folder(
        self, elastic: Path, tmp_path: Path
    ) -> None:
        """Draws of 9 loops were once refused although both they and the limit were changed."""
        path = tmp_path / "mine.yaml"
        text = recipe_file("heal-text").read_text(encoding="utf-8")
        path.write_text(text.replace("[1, 1, 2, 2, 3, 4]", "[9]"), encoding="utf-8")
        changes = {"train.init": str(elastic), "depth.listed_loops": [2]}
        assert load_recipe(path, changes).depth.listed_loops == (2,)
        with pytest.raises(ValueError, match="depth.listed_loops=9 exceeds model.max_loops=4"):
            load_recipe(path, {"train.init": str(elastic)})

    def test_what_is_no_model_to_start_from_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no model at"):
            load_recipe("heal-text", {"train.init": str(tmp_path / "absent")})

    def test_a_converted_model_is_healed_from_python(self, elastic: Path, tmp_path: Path) -> None:
        """Every pattern of the recipe fits; only what the conversion added has changed."""
        result = depthdial.train(
            "heal-text", root=tmp_path, train__init=str(elastic), train__steps=2,
            data__path=str(elastic.parent / "data"), data__context=16, train__val_rows=2,
        )  # fmt: skip
        before = read_tensors(elastic / "model.safetensors")
        after = read_tensors(model_folder(result.path) / "model.safetensors")
        changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        assert changed and {name.partition(".")[0] for name in changed} <= {
            "state_update", "loop_lora",
        }  # fmt: skip

    def test_keys_of_chains_go_when_another_source_is_named(self, chain_recipe: Any) -> None:
        recipe = load_recipe(chain_recipe(), {"data.corpus": "annual-messages"})
        assert (recipe.data.task, recipe.data.num_chains) == (None, None)

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

    @pytest.mark.parametrize(
        ("recipe", "name", "added"),
        [
            ("tiny-pointer", "tiny-pointer", {}),
            (
                "tiny-text",
                "tiny-text",
                {"modulation": ModulationConfig(d_cond=64, rank=16, embed_dim=64)},
            ),
            ("elr-0.5b", "gpt-0.5b", {}),
        ],
    )
    def test_a_recipe_trains_the_preset_of_its_name(
        self, recipe: str, name: str, added: dict[str, object]
    ) -> None:
        assert load_recipe(recipe).model == preset(name).replace(**added)

    def test_an_unknown_name_gets_the_nearest_one(self) -> None:
        with pytest.raises(ValueError, match="Did you mean 'tiny-text'"):
            load_recipe("tiny-txt")

    def test_an_unknown_key_gets_the_nearest_one(self) -> None:
        with pytest.raises(ValueError, match=r"unknown key 'model.loop.updat'. Did you mean"):
            load_recipe("tiny-text", {"model.loop.updat": "delta"})

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_group_that_is_null_beside_a_key_of_it_is_refused(self, order: int) -> None:
        items = [("model.modulation", None), ("model.modulation.rank", 4)][::order]
        with pytest.raises(ValueError, match=r"model.modulation=null and .*rank=4 contradict"):
            load_recipe("tiny-text", dict(items))

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_key_changes_the_group_given_beside_it(self, order: int) -> None:
        items = [("model.modulation", {"d_cond": 8}), ("model.modulation.rank", 4)][::order]
        modulation = load_recipe("tiny-text", dict(items)).model.modulation
        assert modulation is not None
        assert (modulation.d_cond, modulation.rank) == (8, 4)

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

    def test_the_run_records_the_overridden_recipe(self, tiny_folder: Path, tiny_run: Path) -> None:
        recipe = Recipe.from_file(tiny_run / "config.json")
        assert recipe.train.steps == 4
        assert recipe.data.path == str(tiny_folder / "data")


class TestResume:
    def test_a_changed_rate_is_in_force_and_written_down(
        self, tiny_run: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "tiny"
        shutil.copytree(tiny_run, copy)
        shutil.rmtree(copy / "checkpoints" / "step_4")
        records: list[dict[str, object]] = []

        class Recorder:
            def record(self, record: dict[str, object]) -> None:
                records.append(record)

            def notice(self, text: str) -> None:
                return None

        rates = {"optim__lr": 1e-9, "optim__adamw_lr": 2e-9}
        with pytest.warns(UserWarning, match="the resumed run writes these steps again"):
            result = depthdial.resume(copy, observer=Recorder(), **rates)
        assert (result.status, result.step) == ("finished", 4)
        taken = [x for r in records for key, x in r.items() if key.startswith("lr/")]
        assert taken and all(0 <= rate <= 2e-9 for rate in taken)
        assert Recipe.from_file(copy / "config.json").optim.adamw_lr == 2e-9

    def test_a_key_that_would_make_it_another_run_is_refused(self, tiny_run: Path) -> None:
        with pytest.raises(ValueError, match="'model.d_ff' cannot change"):
            depthdial.resume(tiny_run, model__d_ff=64)

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="is no run"):
            depthdial.resume(tmp_path)


def test_a_completion_has_logprobs_where_they_are_asked_for(model):
    plain, asked = (
        model.generate("Fellow", max_new_tokens=3, logprobs=wanted)[0] for wanted in (False, True)
    )
    assert plain.logprobs is None
    assert asked.text == plain.text
    assert len(asked.logprobs) == asked.completion_tokens and max(asked.logprobs) <= 0
