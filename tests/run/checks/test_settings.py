"""mindlora doctor on YAMLs: each mistake is found once, and correct YAMLs have no findings."""

import pytest
import yaml

from mindlora.cli import doctor
from mindlora.cli.doctor.examination import check_yaml
from mindlora.core.overrides import set_key
from mindlora.core.yaml_file import PET
from mindlora.models import target_modules
from mindlora.run.checks.data_rows import check_packing
from mindlora.run.yaml_run import YamlRun
from tests.support.doctor_findings import DATA, finding_at, severities_and_keys

EXCHANGE = "runner_wrapper.gradient_exchange"
QUANTIZED = {EXCHANGE: {"type": "quantized"}, "use_parallel": True, "parallel.parallel_mode": 0}
# Each of data_parallel 1 gets rows of its own.
SHARED_DATA = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": False,
    "parallel.dataset_strategy": [[1, 1], [1, 1]],
}


def test_a_yaml_without_faults(write):
    findings = check_yaml(write())
    assert [(finding.severity, finding.key, finding.found) for finding in findings] == [
        (
            "note",
            f"{PET}.target_modules",
            "LoRA on 4 cells, 3,328 parameters: model.layers.{0..1}.attention.wq, model.layers.{0..1}.attention.wv.",
        ),
        ("note", f"{PET}.target_modules", "Only cells of attention have an adapter."),
    ]


@pytest.mark.parametrize(
    "changes, severity, key, found",
    [
        ({"run_mode": "fintune"}, "error", "run_mode", "run_mode is 'fintune', which is not known. Did you mean 'fine"),
        (
            {f"{PET}.pet_type": "lroa"},
            "error",
            f"{PET}.pet_type",
            "pet_type is 'lroa', which is not known: MindFormers "
            "would train the whole network. Did you mean 'lora'? Known: lora, prefixtuning, ptuning2, qlora, slora.",
        ),
        ({f"{PET}.pet_type": None}, "error", f"{PET}.pet_type", "pet_type is None, which is not known"),
        ({PET: "lora"}, "error", PET, "model.model_config.pet_config is 'lora', but it must be a node with keys"),
        (
            {"moe_config": {"expert_num": 8}, f"{PET}.target_modules": "all-linear"},
            "error",
            f"{PET}.target_modules",
            "LoRA cannot be put on 6 of the selected cells. model.layers.{0..1}.feed_forward.ffn.w1, "
            "model.layers.{0..1}.feed_forward.ffn.w2, model.layers.{0..1}.feed_forward.ffn.w3: Linear holds 8 experts; "
            "LoRA on expert weights is not supported. Add it to exclude_modules.",
        ),
        (
            {
                **{"use_parallel": True, "parallel.parallel_mode": 1, "parallel.full_batch": True},
                **{"parallel_config.pipeline_stage": 2, "model.model_config.offset": [-1, 0, 1]},
            },
            "error",
            "model.model_config",
            "The sizes in model_config cannot be divided: offset [-1, 0, 1] by pipeline_stage 2: it needs a number for",
        ),
        (
            {f"{PET}.lora_rnk": 8},
            "error",
            f"{PET}.lora_rnk",
            "pet_config has an unknown key 'lora_rnk'. Did you mean 'lora_rank'?",
        ),
        (
            {f"{PET}.adapter_pth": "x"},
            "error",
            f"{PET}.adapter_pth",
            "pet_config has an unknown key 'adapter_pth'. Did you mean 'adapter_path'?",
        ),
        ({f"{PET}.lora_rank": 0}, "error", f"{PET}.lora_rank", "lora_rank is 0: it must be a whole number"),
        ({f"{PET}.target_modules": None}, "error", PET, "pet_config has no target_modules"),
        (
            {f"{PET}.lora_alpha": 1e-4},
            "warning",
            f"{PET}.lora_alpha",
            "lora_alpha is 0.0001, which looks like a learning rate",
        ),
        (
            {f"{PET}.target_modules": ".*query"},
            "error",
            f"{PET}.target_modules",
            "target_modules '.*query' matches no "
            "linear cell. Choose from the network's linear cells: model.tok_embeddings, "
            "model.layers.{0..1}.attention.wq, ",
        ),
        (
            {f"{PET}.target_modules": ["wq", "wz"]},
            "error",
            f"{PET}.target_modules",
            "target_modules ['wq', 'wz']: 'wz' matches no linear cell.",
        ),
        (
            {f"{PET}.target_modules": ".*wq|.*wz"},
            "warning",
            f"{PET}.target_modules",
            "target_modules '.*wq|.*wz': '.*wz' matches no linear cell.",
        ),
        (
            {f"{PET}.exclude_modules": "nothing"},
            "error",
            f"{PET}.exclude_modules",
            "exclude_modules 'nothing' matches no",
        ),
        ({f"{PET}.layers_to_transform": [1, 7]}, "error", f"{PET}.layers_to_transform", "layers_to_transform names 7,"),
        (
            {"model.model_config.qkv_concat": True, f"{PET}.target_modules": ".*wq"},
            "error",
            f"{PET}.target_modules",
            "target_modules names wq, but here model.layers.0.attention.w_qkv holds wq, wk, wv in one cell.",
        ),
        (
            {f"{PET}.lora_rank": 17},
            "warning",
            f"{PET}.lora_rank",
            "The rank exceeds the smaller dimension of 2 weights (at least 16): model.layers.{0..1}.attention.wv.",
        ),
        ({f"{PET}.rank_pattern": {"wk": 4}}, "warning", f"{PET}.rank_pattern", "'wk' matches none of the cells"),
        ({f"{PET}.alpha_pattern": {"wk": 4}}, "warning", f"{PET}.alpha_pattern", "'wk' matches none of the cells"),
        (
            {f"{PET}.param_init_type": "bfloat16"},
            "warning",
            f"{PET}.param_init_type",
            "A and B are stored in bfloat16, with a precision "
            "of 8 bits: an optimizer step below 1/256 of a weight is rounded away.",
        ),
        (
            {f"{PET}.compute_dtype": "float16", "runner_wrapper.scale_sense": 1024},
            "warning",
            f"{PET}.compute_dtype",
            "LoRA computes in float16 on activations in bfloat16",
        ),
        (
            {"model.model_config.compute_dtype": "float16", "model.model_config.param_init_type": "float16"},
            "warning",
            "runner_wrapper.scale_sense",
            "Gradients are computed in float16 and the loss is not scaled",
        ),
        (
            {"model.model_config.compute_dtype": "float16", "runner_wrapper.scale_sense": {"type": "X"}},
            "warning",
            "model.model_config.compute_dtype",
            "The base is stored in bfloat16 and computed in float16",
        ),
        (
            {"model.model_config.compute_dtype": "float61"},
            "error",
            "model.model_config.compute_dtype",
            "compute_dtype is 'float61': it must be one of",
        ),
        (
            {"model.model_config.num_heads": "4"},
            "error",
            "model.model_config.num_heads",
            "model.model_config.num_heads is '4', but it must be a whole number",
        ),
        ({"lr_schedule.learning_rate": "1e-4"}, "error", "lr_schedule.learning_rate", "YAML reads 1e-4 as text"),
        (
            {"model.model_config.rms_norm_eps": "1.0e5"},
            "warning",
            "model.model_config.rms_norm_eps",
            "YAML reads 1.0e5 as",
        ),
        (
            {"load_checkpoint": "none.ckpt"},
            "error",
            "load_checkpoint",
            "none.ckpt does not exist (the current folder is ",
        ),
        ({"load_checkpoint": 3}, "error", "load_checkpoint", "load_checkpoint is 3, but it must be a path."),
        ({f"{PET}.loraplus_lr_ratio": 0.5}, "error", f"{PET}.loraplus_lr_ratio", "loraplus_lr_ratio is 0.5: it must"),
        (
            {f"{PET}.loraplus_lr_ratio": 4, f"{PET}.lora_init": "mica"},
            "error",
            f"{PET}.loraplus_lr_ratio",
            "loraplus_lr_ratio is 4 and lora_init is 'mica': LoRA+ speeds up B, which mica does not train.",
        ),
        (
            {f"{PET}.loraplus_lr_ratio": 4, f"{PET}.use_vera": True, f"{PET}.lora_alpha": None},
            "error",
            f"{PET}.loraplus_lr_ratio",
            "loraplus_lr_ratio is 4 and use_vera is True: LoRA+ speeds up B, which VeRA does not train.",
        ),
        ({EXCHANGE: "topk"}, "error", EXCHANGE, "gradient_exchange is of type 'topk', but it must be one of dense, "),
        ({EXCHANGE: {"bits": 4}}, "error", EXCHANGE, "gradient_exchange: bits belongs to type quantized, but the type"),
        (
            {EXCHANGE: "float16", "runner_wrapper.type": "MFTrainOneStepCell"},
            "error",
            EXCHANGE,
            "gradient_exchange is an argument of LoraTrainOneStepCell, but runner_wrapper.type is 'MFTrainOneStepCell'",
        ),
        (
            {**QUANTIZED, "parallel_config.pipeline_stage": 2},
            "error",
            EXCHANGE,
            "gradient_exchange is quantized, but parallel_config.pipeline_stage is 2: gradients are compressed only",
        ),
        (
            {**QUANTIZED, "parallel.enable_parallel_optimizer": True},
            "error",
            EXCHANGE,
            "gradient_exchange is quantized, but parallel.enable_parallel_optimizer is True: gradients",
        ),
        (
            {**QUANTIZED, "parallel.parallel_mode": 1},
            "error",
            EXCHANGE,
            "gradient_exchange is quantized, but parallel.parallel_mode is 1: gradients",
        ),
        (
            {"use_parallel": True, "parallel.parallel_mode": 1, f"{PET}.use_dora": True},
            "error",
            f"{PET}.target_modules",
            "LoRA cannot be put on 4 of the selected cells. model.layers.{0..1}.attention.wq, "
            "model.layers.{0..1}.attention.wv: use_dora is not supported on sharded cells: the norm of a row of W + "
            "scale B A needs all of the row. Leave use_dora out, or train in data parallel (parallel_mode: 0).",
        ),
        (
            {"use_parallel": True, "parallel.parallel_mode": 1, "callbacks": [{"type": "WarmUp", "steps": 5}]},
            "error",
            "callbacks.WarmUp",
            "callbacks.WarmUp needs mindlora's train step, alone or in data parallel.",
        ),
        (
            {"runner_wrapper.type": "MFTrainOneStepCell", "callbacks": [{"type": "TrainingGuard"}]},
            "error",
            "callbacks.TrainingGuard",
            "callbacks.TrainingGuard needs mindlora's train step, alone or in data parallel.",
        ),
        ({f"{PET}.lora_init": "pisa"}, "error", f"{PET}.lora_init", "lora_init is 'pisa', which is not known."),
        ({f"{PET}.adapter_path": "none"}, "error", f"{PET}.adapter_path", "none does not exist"),
        ({DATA: "none.mindrecord"}, "error", DATA, "none.mindrecord does not exist"),
        ({"train_dataset": {}}, "error", "train_dataset.data_loader", "The node is missing, so the run has no data."),
        # Training does not read it.
        (
            {"processor.tokenizer.vocab_file": "none.model"},
            "warning",
            "processor.tokenizer.vocab_file",
            "none.model does",
        ),
        (
            {"context.ascend_config": {"parallel_speed_up_json_path": "none.json"}},
            *("error", "context.ascend_config.parallel_speed_up_json_path", "none.json does not exist"),
        ),
        (
            {**SHARED_DATA, "parallel_config.data_parallel": 8},
            *(
                "error",
                "parallel.dataset_strategy",
                "parallel_config.data_parallel is 8, and parallel.dataset_strategy",
            ),
        ),
        (
            {**SHARED_DATA, "train_dataset.input_columns": ["input_ids", "labels", "loss_mask"]},
            *(
                "error",
                "parallel.dataset_strategy",
                "parallel.dataset_strategy divides 2 input columns, but train_datas",
            ),
        ),
        (
            {**SHARED_DATA, "parallel.dataset_strategy": "full_batch"},
            *(
                "error",
                "parallel.dataset_strategy",
                "parallel.full_batch is False, and dataset_strategy is 'full_batch'",
            ),
        ),
        ({"context.affinity_config": "none.json"}, "error", "context.affinity_config", "none.json does not exist"),
        ({"src_strategy_path_or_dir": "none"}, "error", "src_strategy_path_or_dir", "none does not exist"),
        (
            {"parallel.strategy_ckpt_config": {"load_file": "none.ckpt"}},
            *("error", "parallel.strategy_ckpt_config.load_file", "none.ckpt does not exist"),
        ),
        (
            {"train_dataset.data_loader": {"type": "HFDataLoader", "path": "json", "data_files": "none.json"}},
            *("error", "train_dataset.data_loader.data_files", "none.json does not exist"),
        ),
        (
            {"train_dataset.data_loader": {"type": "ADGenDataLoader", "dataset_dir": "none.json"}},
            *("error", "train_dataset.data_loader.dataset_dir", "none.json does not exist"),
        ),
        (
            {
                "train_dataset.data_loader": {
                    "type": "BlendedMegatronDatasetDataLoader",
                    "config": {"data_path": ["0.5", "none_text_document"]},
                },
                "model.model_config.input_sliced_sig": True,
            },
            *("error", "train_dataset.data_loader.config.data_path", "none_text_document.idx does not exist"),
        ),
        (
            {"do_eval": True, "eval_dataset.data_loader": {"type": "MindDataset", "dataset_dir": "none"}},
            "error",
            "eval_dataset.data_loader.dataset_dir",
            "none does not exist",
        ),
    ],
)
def test_what_is_wrong_is_found_once_and_nothing_else(write, changes, severity, key, found):
    path = write(changes)
    assert severities_and_keys(path) == [(severity, key)]
    assert finding_at(path, key).found.startswith(found)
    assert doctor.examine([path]).exit_code == (severity == "error")


@pytest.mark.parametrize(
    "changes, key, found",
    [
        ({"load_checkpoint": ""}, "load_checkpoint", "No path is set: the base under the adapter has random weights."),
        ({DATA: ""}, DATA, "No path is set: the run has no data."),
        ({PET: None}, PET, "There is no pet_config: the whole network is trained, without LoRA."),
        (
            {f"{PET}.pet_type": "ptuning2"},
            f"{PET}.pet_type",
            "pet_type ptuning2 is MindFormers' own and was not checked.",
        ),
        ({"model.arch.type": "GLM"}, f"{PET}.target_modules", "The model is GLM: the doctor does not know its cells"),
        (
            {"moe_config": {"expert_num": 8, "shared_expert_num": 1}},
            f"{PET}.target_modules",
            "The model is LlamaForCausalLM with experts: the doctor",
        ),
        (
            {"moe_config": {"expert_num": 8}, f"{PET}.target_modules": ["wq", "router.dense"]},
            f"{PET}.target_modules",
            "LoRA on 4 cells, ",
        ),
        (
            {"model.model_config.param_init_type": "float16"},
            "model.model_config.param_init_type",
            "The base is stored in float16, and every product rounds it to bfloat16.",
        ),
    ],
)
def test_notes_are_not_faults(write, changes, key, found):
    path = write(changes)
    assert severities_and_keys(path) == [] and doctor.examine([path]).exit_code == 0
    assert any(finding.key == key and finding.found.startswith(found) for finding in check_yaml(path))


@pytest.mark.parametrize(
    "changes",
    [
        {f"{PET}.preset": "small_dataset"},
        {f"{PET}.target_modules": "all-linear", f"{PET}.rank_pattern": {"wk|wv": 4}},
        {f"{PET}.target_modules": ["q_proj", "model.layers.1.self_attn.v_proj"]},
        {f"{PET}.lora_rank": 16},
        {
            "model.model_config.compute_dtype": "float16",
            "model.model_config.param_init_type": "float16",
            "runner_wrapper.scale_sense": {"type": "DynamicLossScaleUpdateCell"},
        },
        {
            "run_mode": "predict",
            f"{PET}.param_init_type": "float16",
            "model.model_config.compute_dtype": "float16",
            "model.model_config.param_init_type": "float16",
            DATA: "none",
        },
        {"eval_dataset.data_loader": {"type": "MindDataset", "dataset_dir": "none"}},
        {"train_dataset.data_loader": {"type": "MindDataset", "dataset_files": ["x"], "dataset_dir": "none"}},
    ],
)
def test_what_is_right_has_no_findings(write, changes):
    assert severities_and_keys(write(changes)) == []


def test_warnings_are_shown_again_after_a_check(write):
    before = target_modules.logger.handlers, target_modules.logger.propagate
    check_yaml(write({f"{PET}.target_modules": ".*wq|.*wz"}))
    assert (target_modules.logger.handlers, target_modules.logger.propagate) == before


def test_the_advice_for_a_number_that_yaml_reads_as_text(write):
    for text, right in (("1e-4", "1.0e-4"), ("5e5", "5.0e+5"), ("2.5e3", "2.5e+3")):
        found = finding_at(write({"lr_schedule.learning_rate": text}), "lr_schedule.learning_rate")
        assert found.advice == f"Write {right}."
        assert yaml.safe_load(right) == float(text)


@pytest.mark.parametrize(
    "content, found",
    [
        ("a: [", "is not YAML: while parsing"),
        ("- a\n- b", "has no keys"),
        ("", "has no keys"),
        ("run_mode: train", "has no model.model_config"),
        ("model: {model_config: 3}", "has no model.model_config"),
        ("model: 3", "has no model.model_config"),
        (None, "cannot be read: No such file or directory."),
        (b"\xff\xfe", "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_mindformers_yaml(tmp_path, content, found):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (finding,) = check_yaml(str(path))
    assert (finding.severity, finding.key) == ("error", "") and finding.found.startswith(f"{path} {found}")


def test_a_yaml_overrides_its_base_config(write, tmp_path):
    write(name="base.yaml")
    path = tmp_path / "over.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "base_config": "base.yaml",
                "model": {"model_config": {"pet_config": {"lora_rank": 99, "target_modules": ".*wo"}}},
            }
        ),
        encoding="utf-8",
    )
    assert severities_and_keys(str(path)) == [("warning", f"{PET}.lora_rank")]
    path.write_text("base_config: [base.yaml, none.yaml]", encoding="utf-8")
    (finding,) = check_yaml(str(path))
    refusal = "cannot be read: No such file or directory. Correct the path or its permissions."
    assert finding.found == f"{tmp_path / 'none.yaml'} {refusal}"


def test_the_right_strategy_of_the_data_is_in_the_advice(write):
    columns = {"train_dataset.input_columns": ["input_ids", "attention_mask"], "parallel_config.data_parallel": 4}
    advice = finding_at(write({**SHARED_DATA, **columns}), "parallel.dataset_strategy").advice
    right = [[4, 1], [4, 1, 1, 1]]
    assert f"--parallel.dataset_strategy '{right}'" in advice
    assert severities_and_keys(write({**SHARED_DATA, **columns, "parallel.dataset_strategy": right})) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.full_batch": True, "parallel_config.data_parallel": 8},
        {"use_parallel": False, "parallel_config.data_parallel": 8},
        {"parallel.dataset_strategy": None, "train_dataset.data_loader": {"type": "HFDataLoader", "path": "a/b"}},
        {"train_dataset.input_columns": ["input_ids", "labels"]},
    ],
)
def test_a_strategy_that_counts_for_nothing_or_suits_the_run_is_no_fault(write, changes):
    assert severities_and_keys(write({**SHARED_DATA, **changes})) == []


@pytest.mark.parametrize(
    "loader",
    [
        {"type": "HFDataLoader", "path": "someone/alpaca.v2", "data_files": "data/*.json"},
        {"type": "HFDataLoader", "path": "json", "data_files": "https://example.org/a.json"},
        {"type": "SFTDataLoader", "dataset_dir": "wikitext"},
    ],
)
def test_what_may_be_of_a_hub_is_no_missing_file(write, loader):
    assert severities_and_keys(write({"train_dataset.data_loader": loader})) == []


@pytest.mark.parametrize("run_mode", ["predict", "eval"])
def test_a_tokenizer_that_is_read_must_be_there(write, run_mode):
    changes = {"run_mode": run_mode, "processor.tokenizer.vocab_file": "none.model"}
    assert ("error", "processor.tokenizer.vocab_file") in severities_and_keys(write(changes))


PACKED = {
    "train_dataset.data_loader": {"type": "HFDataLoader", "path": "a/b", "handler": [{"type": "PackingHandler"}]},
    "model.model_config.input_sliced_sig": True,
}
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]


def test_packed_rows_without_a_column_that_keeps_examples_apart_are_a_warning(write):
    path = write({**PACKED, "train_dataset.input_columns": COLUMNS})
    assert severities_and_keys(path) == [("warning", "train_dataset.input_columns")]
    finding = finding_at(path, "train_dataset.input_columns")
    assert "so the examples of a row see each other" in finding.found and "Add attention_mask" in finding.advice
    for column in ("attention_mask", "actual_seq_len"):
        assert severities_and_keys(write({**PACKED, "train_dataset.input_columns": [*COLUMNS, column]})) == []
    assert severities_and_keys(write(PACKED)) == []
    loader = {**PACKED["train_dataset.data_loader"], "handler": [{"type": "take", "n": 5}]}
    changes = {"train_dataset.data_loader": loader, "train_dataset.input_columns": COLUMNS}
    assert severities_and_keys(write({**PACKED, **changes})) == []


@pytest.mark.parametrize("kind", ["HFDataLoader", "CommonDataLoader", "BlendedMegatronDatasetDataLoader"])
def test_a_legacy_model_must_know_that_labels_of_packed_rows_are_shifted(write, kind):
    loader = {**PACKED["train_dataset.data_loader"], "type": kind}
    path = write({"train_dataset.data_loader": loader})
    assert severities_and_keys(path) == [("error", "model.model_config.input_sliced_sig")]


@pytest.mark.parametrize(
    "key, use_legacy",
    [
        ("model.model_config.use_attn_mask_compression", True),
        ("model.model_config.use_eod_attn_mask_compression", False),
        ("train_dataset.data_loader.create_compressed_eod_mask", False),
    ],
)
def test_a_compressed_mask_is_for_rows_of_2048_tokens_at_least(key, use_legacy):
    def found(length):
        config = {"run_mode": "finetune", "use_legacy": use_legacy, "train_dataset": {"data_loader": {}}}
        config["model"] = {"model_config": {"seq_length": length}}
        set_key(config, key, True, "--x")
        return list(check_packing(YamlRun(config)))

    (finding,) = found(1024)
    assert finding.severity == "error" and finding.key == key
    assert "seq_length is 1024: MindFormers compresses masks of at least 2048 tokens" in finding.found
    assert found(2048) == []


def test_a_whole_base_of_safetensors_is_a_folder_that_mindformers_slices_for_several_devices(write, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/model.safetensors").touch()
    keys = {"use_parallel": True, "parallel.parallel_mode": 1, "load_ckpt_format": "safetensors"}
    folder, file = str(tmp_path / "base"), str(tmp_path / "base/model.safetensors")
    sliced = {**keys, "load_checkpoint": folder, "auto_trans_ckpt": True}
    assert severities_and_keys(write(sliced)) == []
    assert severities_and_keys(write({**sliced, "auto_trans_ckpt": False})) == [("error", "auto_trans_ckpt")]
    assert severities_and_keys(write({**sliced, "load_checkpoint": file})) == [("error", "load_checkpoint")]
    assert severities_and_keys(write({**sliced, "use_parallel": False, "auto_trans_ckpt": False})) == []
    quantized = {f"{PET}.quantize_base": "nf4", "load_checkpoint": file}
    found = finding_at(write({**sliced, **quantized}), "load_checkpoint")
    assert found.severity == "error" and "Set parallel.parallel_mode: 0" in found.advice
    (tmp_path / "base/rank_0").mkdir()
    assert severities_and_keys(write({**sliced, "auto_trans_ckpt": False})) == []
