"""YAMLs of small runs as mindlora plan reads them, and the networks that MindFormers builds of the same sizes."""

from mindlora.run.plan.run import read_run
from tests.support.cpu_llama import ON_CPU

# Sizes that differ from each other wherever the model lets them.
TINY = {
    "type": "LlamaConfig",
    "seq_length": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    **ON_CPU,
}
LORA = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": "all-linear"}
SEVERAL = {**LORA, "adapters": [{"lora_rank": 4}, {"lora_rank": 12, "target_modules": ".*wq|.*w2"}, {}]}


def yaml_of(model=None, pet=None, **nodes):
    """Returns the content of a YAML; ``pet`` None is LORA, and {} none at all; further nodes replace those below."""
    pet = dict(LORA if pet is None else pet)
    return {
        "run_mode": "finetune",
        "runner_config": {"batch_size": 2, "epochs": 1, "sink_mode": False},
        "optimizer": {"type": "AdamW"},
        "context": {"device_target": "CPU"},
        "model": {
            "model_config": {**TINY, **(model or {}), **({"pet_config": pet} if pet else {})},
            "arch": {"type": "LlamaForCausalLM"},
        },
        "runner_wrapper": {"type": "LoraTrainOneStepCell"},
        **nodes,
    }


def run_of(model=None, pet=None, **nodes):
    """Returns the Run of such a YAML."""
    return read_run(yaml_of(model, pet, **nodes))


def adapted(network, pet):
    """Returns ``network`` with the adapter of a pet_config, or with several, and all else frozen."""
    from mindlora import LoraConfig, apply_lora, freeze_base
    from mindlora.training.several.stack import stack_adapters

    if pet.get("adapters"):
        shared = {key: value for key, value in pet.items() if key != "adapters"}
        stack_adapters(network, [LoraConfig.from_pet_config({**shared, **own}) for own in pet["adapters"]])
    elif pet:
        config = LoraConfig.from_pet_config(pet)
        apply_lora(network, config)
        freeze_base(network, config)
    return network
