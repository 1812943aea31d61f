"""mindlora plan of a YAML of MindFormers' PyNative Trainer, against the run of that YAML."""

import json

import pytest
import yaml
from safetensors.numpy import load_file

from mindlora import cli
from mindlora.run.plan.report import make_plan
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, LORA, LORA_WITH_EXPERTS, only_with_pynative_trainer

STEPS, ROWS = 2, 16
# Name -> model, lora_config, pet_config.
RUNS = {
    "plain": ("qwen3", LORA, {}),
    "dora": ("qwen3", LORA, {"use_dora": True, "rank_pattern": {".*linear_proj": 2}, "modules_to_save": ["lm_head"]}),
    "nf4": ("qwen3", LORA, {"quantize_base": "nf4"}),
    "pissa": ("qwen3", {**LORA, "exclude_layers": r"layers\.0"}, {"lora_init": "pissa", "freeze_lora_a": True}),
    "adalora": ("qwen3", LORA, {"use_adalora": True, "target_r": 2}),
    "experts": ("deepseek_v3", LORA_WITH_EXPERTS, {}),
    "half": ("qwen3", LORA, {"param_init_type": "float16"}),
}
PROJECTIONS = ".*linear_proj"
SEVERAL = {"adapters": [{"name": "one"}, {"name": "other", "lora_rank": 6, "target_modules": PROJECTIONS}]}


def written(folder, name):
    """Returns the path of a run's YAML."""
    model, lora, pet_config = RUNS.get(name, ("qwen3", LORA, SEVERAL))
    data = folder / "rows.mindrecord"
    config = pynative_runs.tiny_config(model, data, STEPS, lora_config=lora, pet_config=pet_config)
    saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": STEPS}
    loaded = {"load_path": str(folder / "base"), "no_load_optim": True} if model == "qwen3" else {}
    config["checkpoint"] = {**saved, **loaded}
    config["callbacks"] = [
        {"type": "LoraCheckpoint", "directory": str(folder / f"{name}_peft")},
        {"type": "RecordLosses", "directory": str(folder / name), "frozen": True},
    ]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all RUNS have run."""
    folder = tmp_path_factory.mktemp("plan")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=ROWS)
    pynative_runs.write_base(folder / "base", folder / "hf")
    configs = []
    for name in (*RUNS, "several"):
        with open(written(folder, name), encoding="utf-8") as file:
            configs.append(yaml.safe_load(file))
    assert pynative_runs.series(configs, folder) == [None] * len(configs)
    return folder


def line(plan, name):
    return sum(each.size for each in plan.lines if each.name.startswith(name))


@only_with_pynative_trainer
@pytest.mark.parametrize("name", RUNS)
def test_it_is_what_the_run_has(folder, name):
    plan = make_plan(str(folder / f"{name}.yaml"))
    trained = pynative_runs.trained(folder / name)
    assert plan.trained == sum(array.size for array in trained.values())
    model = load_file(folder / f"{name}_saved" / f"iteration_{STEPS:08d}" / BASE_FILE)
    # The pairs that pissa has taken out of the base are kept beside it, and routers count tokens.
    kept = {key: array for key, array in model.items() if "initial_lora" not in key and "tokens_per_expert" not in key}
    adapter = sum(array.nbytes for key, array in kept.items() if "lora" in key)
    assert line(plan, "adapter") == adapter
    assert line(plan, "base") == sum(array.nbytes for array in kept.values()) - adapter
    weights = folder / f"{name}_peft" / f"step_{STEPS}" / "adapter_model.safetensors"
    assert plan.adapter_file == (None if name == "adalora" else weights.stat().st_size)
    states = load_file(folder / f"{name}_saved" / f"iteration_{STEPS:08d}" / BASE_FILE.replace("model", "opt", 1))
    assert line(plan, "optimizer") == sum(array.nbytes for array in states.values() if array.ndim and array.size > 1)


@only_with_pynative_trainer
def test_of_several_adapters_it_is_what_all_of_them_have(folder):
    plan = make_plan(str(folder / "several.yaml"))
    trained = pynative_runs.trained(folder / "several")
    assert line(plan, "adapter") == sum(array.nbytes for array in trained.values())
    states = load_file(folder / "several_saved" / f"iteration_{STEPS:08d}" / BASE_FILE.replace("model", "opt", 1))
    assert line(plan, "optimizer") == sum(array.nbytes for name, array in states.items() if name.startswith("adam"))
    files = list((folder / "several_peft").glob(f"*/lora_checkpoint/step_{STEPS}/adapter_model.safetensors"))
    assert len(files) == 2 and plan.adapter_file == sum(file.stat().st_size for file in files)
    assert plan.adapter == "2 adapters, each LoRA of rank 4, 6"
    # Without what fills the smaller rank up.
    of_other = sum(array[1].size for name, array in trained.items() if "linear_proj" in name)
    assert plan.trained == make_plan(str(folder / "plain.yaml")).trained + of_other


@only_with_pynative_trainer
def test_its_steps_are_those_of_the_yaml(folder):
    plan = make_plan(str(folder / "plain.yaml"), ["--training.steps", "100"])
    assert (plan.steps, plan.rows_per_step, plan.rows) == (100, 4, ROWS)
    assert "100 of 4 rows, 6,400 tokens with padding: 25.00 times 16 rows (1 MindRecord)" in str(plan)


@pytest.mark.parametrize(
    "flags, code, said",
    [
        (["--memory", "1GB"], 0, "These fit; activations come on top of that: a device has 0.93 GiB."),
        (["--memory", "10kB"], 1, "These do not fit"),
        (["--json"], 0, '"adapter_file": '),
        (["--verify"], 1, "makes no graph that MindSpore's planner could be asked about"),
        (["--lora_config.target_modules", "nowhere"], 1, "target_modules 'nowhere' matches no cell"),
        (["--pet_config.lora_rank", "8"], 1, "pet_config.lora_rank is 8 and lora_config.lora_rank is 4"),
        (["--model.model_type", "other", "--model.architectures", "Other"], 1, "a model whose sizes are not known"),
        (["--parallelism.data_parallel", "4"], 0, "parallelism has data_parallel 4"),
    ],
)
def test_the_command_says_what_it_takes(tmp_path, capsys, flags, code, said):
    """It needs neither data nor a base, and no MindFormers 2."""
    assert cli.main(["plan", written(tmp_path, "plain"), *flags]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    if "--json" in flags:
        assert json.loads(printed.out)["trained"] > 0
