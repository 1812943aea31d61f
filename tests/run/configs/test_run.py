"""The YAML of a training run: what was asked of it is in it, and what cannot be is refused."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from mindlora.core.errors import ConfigError
from mindlora.data.mindrecord import first_rows, write_mindrecord
from mindlora.files.base.tokenizer_files import TurnEnd
from mindlora.models.lora_config import PRESETS
from mindlora.run.configs.folder import CPU, model_nodes, read_folder
from mindlora.run.configs.run import Request, Rows, draft_run, read_rows
from mindlora.run.yaml_run import YamlRun
from mindlora.training.preference.rules import check_preference
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import HUGGING_FACE, VOCAB, llama, save_base
from tests.support.quantized_checkpoints import quantized_llama, save_quantized

ROWS = Rows("rows.mindrecord", 100, 65, 1, None, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama's folder, read."""
    path = tmp_path_factory.mktemp("drafts") / "tiny-llama"
    save_base(path, llama(), **HUGGING_FACE, vocab_size=VOCAB, max_position_embeddings=128)
    chat_tokenizer(CHATML).save_pretrained(path)
    return read_folder(str(path))


def draft(folder, **asked):
    return draft_run(folder, Request(**{"output": "run.yaml", "device": "cpu", **asked}))


def test_the_text_is_the_content(folder):
    made = draft(folder, rows=ROWS)
    assert yaml.safe_load(made.text) == made.content
    assert "# of all settings the one to try first" in made.text
    assert made.commands[0] == "mindlora-run --config run.yaml"
    # Answers need the prompt of the rows, which a MindRecord does not name.
    assert made.commands[1].endswith("# for rows of mindlora data alpaca: --template alpaca")
    assert draft(folder).commands[-1].endswith("--prompt 'Hello' --template alpaca")
    assert "--template" not in draft(folder, rows=replace(ROWS, loss="dpo")).commands[-1]


def test_rows_give_length_batch_and_steps(folder):
    made = draft(folder, rows=ROWS)
    assert made.content["model"]["model_config"]["seq_length"] == 64
    assert made.content["runner_config"]["gradient_accumulation_steps"] == 16
    assert made.steps == 18 and made.content["callbacks"][-1]["save_steps"] == 6
    assert "# data: 100 rows of 65 tokens; a step: 16 rows; steps: 6 in an epoch, 18 in all" in made.text
    few = draft(folder, rows=replace(ROWS, count=5))
    assert few.steps == 3 and few.content["runner_config"]["gradient_accumulation_steps"] == 5


def test_on_a_cpu_the_base_stays_in_the_dtype_of_its_file_where_it_can(folder):
    def held(of=folder, **asked):
        return draft(of, **asked).content["model"]["model_config"]["param_init_type"]

    assert folder.stored == held() == held(rows=replace(ROWS, loss="dpo")) == "bfloat16"
    assert held(replace(folder, stored="float32")) == "float32"


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_what_holds_the_weights_of_a_quantized_folder_is_said(device, tmp_path):
    tensors, _ = quantized_llama("gptq")
    path = save_quantized(tmp_path / "model", "gptq", tensors, max_position_embeddings=128)
    chat_tokenizer(CHATML).save_pretrained(path)
    read = read_folder(path, to_train=True)
    written = draft(read, device=device)
    held = written.content["model"]["model_config"]["param_init_type"]
    assert read.stored == "bfloat16"
    assert written.notes[:2] == (
        "14 weights are decoded from GPTQ in 4 bits to bfloat16.",
        f"the run holds the decoded weights in {held} (model.model_config.param_init_type)",
    )


@pytest.mark.parametrize("loss, marks", [("dpo", "pairs"), ("kto", "judgments")])
def test_preferences_get_their_loss_and_columns(folder, loss, marks):
    made = draft(folder, rows=replace(ROWS, loss=loss))
    assert made.content["runner_wrapper"]["preference"] == {"loss": loss}
    assert made.content["train_dataset"]["input_columns"] == ["input_ids", "labels", "answers", marks]
    assert list(check_preference(YamlRun(made.content))) == []
    (note,) = made.notes
    assert note.startswith(f"rows.mindrecord holds preferences, which the run learns with the loss {loss}")


def test_labels_are_no_preferences(folder):
    made = draft(folder, rows=ROWS)
    assert "preference" not in made.content["runner_wrapper"] and made.notes == ()


def test_pairs_that_are_not_packed_halve_the_batch(folder):
    pairs = replace(ROWS, loss="dpo", of_model=2)
    assert draft(folder, device="npu", rows=pairs).content["runner_config"]["batch_size"] == 2
    assert draft(folder, device="cpu", rows=pairs).content["runner_config"]["batch_size"] == 1


def test_the_end_of_a_turn_that_the_folder_does_not_state_is_named(folder):
    end = TurnEnd("<|im_end|>", 4)
    (note,) = draft(replace(folder, unstated_end=end)).notes
    assert "ends the assistant's turns with '<|im_end|>' (4), but the folder does not say" in note


@pytest.mark.parametrize(
    "shape, columns", [((2, 49), ["answers", "pairs"]), ((49,), ["answers", "judgments"]), ((49,), [])]
)
def test_rows_of_pairs_are_as_long_as_an_answer_with_its_prompt(tmp_path, shape, columns):
    path = str(tmp_path / "rows.mindrecord")
    write_mindrecord([dict.fromkeys(["input_ids", "labels", *columns], np.ones(shape, np.int32))], path)
    rows = read_rows(path, first_rows)
    assert rows.tokens == 49 and rows.of_model == (2 if len(shape) > 1 else 1)
    assert rows.loss == {(): None, ("answers", "pairs"): "dpo", ("answers", "judgments"): "kto"}[tuple(columns)]


def test_held_out_rows_choose_the_best_adapter(folder):
    made = draft(folder, rows=replace(ROWS, held_out="rows-heldout.mindrecord"))
    held_out, save = made.content["callbacks"][1:]
    assert held_out["dataset_dir"] == "rows-heldout.mindrecord" and save["best_metric"] == "held_out_loss"
    assert save["save_steps"] % held_out["every_steps"] == 0


def test_a_recipe_sets_rank_alpha_dropout_and_rate(folder):
    for name, recipe in PRESETS.items():
        content = draft(folder, recipe=name).content
        pet = {**content["model"]["model_config"]["pet_config"], **content["lr_schedule"]}
        assert {key: pet[key] for key in recipe} == recipe
    with pytest.raises(ConfigError, match="small_dataset"):
        draft(folder, recipe="small_data")


@pytest.mark.parametrize("teacher", ["base", {"url": "http://localhost:8000", "model": "large"}])
def test_a_teacher_takes_the_place_of_rewards(teacher, folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}", encoding="utf-8")
    prompts = str(tmp_path / "prompts.jsonl")
    made = draft(folder, prompts=prompts, teacher=teacher)
    rl = made.content["runner_wrapper"]["rl"]
    assert rl["teacher"] == teacher and "reward_funcs" not in rl
    assert yaml.safe_load(made.text) == made.content and "which are rated by a teacher" in made.text
    both = draft(folder, prompts=prompts, teacher=teacher, rewards=("exact_answer",))
    assert both.content["runner_wrapper"]["rl"] == {"reward_funcs": ["exact_answer"], **rl}


def test_eight_npus_share_the_batch(folder):
    content = draft(folder, device="npu", devices=8, rows=ROWS).content
    assert content["use_parallel"] is True and content["parallel_config"]["data_parallel"] == 8
    assert (content["parallel"]["parallel_mode"], content["parallel"]["full_batch"]) == (0, False)
    assert content["load_checkpoint"] == folder.path
    assert content["model"]["model_config"]["compute_dtype"] == "bfloat16"
    assert content["runner_config"]["batch_size"] == 4
    assert draft(folder, device="npu", devices=8, rows=ROWS).commands[0].startswith("msrun --worker_num=8 ")
    preferences = draft(folder, device="npu", devices=8, rows=replace(ROWS, loss="dpo")).content
    assert preferences["runner_wrapper"]["preference"] == {"loss": "dpo"} and preferences["use_parallel"] is True


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"devices": 0}, "--devices is 0"),
        ({"prompts": "prompts.jsonl"}, "Give --prompts, and --rewards or --teacher"),
        ({"teacher": "base"}, "Give --prompts, and --rewards or --teacher"),
        ({"devices": 2}, "divides nothing among CPU processes"),
        ({"seq_length": 32, "rows": ROWS}, "--seq-length is 32, but the rows of rows.mindrecord have 65"),
        ({"device": "npu", "devices": 8, "rows": replace(ROWS, count=7)}, "has 7 rows, too few for 8 devices"),
    ],
)
def test_what_cannot_be_is_refused(asked, said, folder):
    with pytest.raises(ConfigError, match=said):
        draft(folder, **asked)


def test_an_mcore_model_computes_in_float32_on_a_cpu_and_learns_preferences(folder):
    architecture = replace(folder.architecture, title="Qwen3", legacy=False)
    nodes = model_nodes(replace(folder, architecture=architecture), CPU, 32)
    assert nodes["use_legacy"] is False and nodes["context"] == {"mode": 0, "device_target": "CPU"}
    assert nodes["model"]["model_config"]["compute_dtype"] == "float32"
    model_config = {**folder.model_config, "architectures": ["Qwen3ForCausalLM"]}
    qwen3 = replace(folder, architecture=architecture, model_config=model_config)
    made = draft(qwen3, device="npu", rows=replace(ROWS, loss="dpo"))
    assert made.content["runner_wrapper"]["preference"] == {"loss": "dpo"}
    assert list(check_preference(YamlRun(made.content))) == []
