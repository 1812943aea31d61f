"""Small networks of MindFormers' mcore models, with mindlora's cells for a CPU."""

import contextlib
import importlib
import json
import types
from unittest import mock

import numpy as np
import pytest
from mindspore import Tensor, nn

from tests.support import tiny_runs

# What a YAML must say of an mcore model so that it runs on a CPU.
IN_FLOAT32 = {
    "attention_dropout": 0.0,
    "params_dtype": "float32",
    "compute_dtype": "float32",
    "layernorm_compute_dtype": "float32",
    "softmax_compute_dtype": "float32",
    "rotary_dtype": "float32",
}
# A YAML's model_config; sizes that differ from each other wherever the model lets them.
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "seq_length": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "ignore_token_id": -100,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    **IN_FLOAT32,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_grouped_gemm": True}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_scaling": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
# model_type -> architectures, and the model_config.
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# model_type -> module and class of MindFormers' configuration.
CONFIGS = {
    "qwen3": ("qwen3.configuration_qwen3", "Qwen3Config"),
    "qwen3_moe": ("qwen3_moe.configuration_qwen3_moe", "Qwen3MoeConfig"),
    "deepseek_v3": ("deepseek3.configuration_deepseek_v3", "DeepseekV3Config"),
}
SIZES = {
    "qwen3": TINY,
    "qwen3_moe": {**TINY, **_EXPERTS, "num_experts": 4, "routed_scaling_factor": 1.0},
    "deepseek_v3": {**{key: value for key, value in TINY.items() if key != "head_dim"}, **_EXPERTS, **_LATENT},
}


@contextlib.contextmanager
def mcore_context():
    """Lets MindFormers build mcore models in what it holds, as a YAML with use_legacy: False and context.mode: 0 does.

    Without a run's context, MindFormers would make one, of other settings, for the whole process.
    """
    settings = types.SimpleNamespace(get_context={"use_legacy": False}.get)
    operator = "mindformers.core.context.build_context.MFContextOperator.get_mf_ctx_instance"
    with mock.patch(operator, lambda: settings), contextlib.ExitStack() as stack:
        for name in ("qwen3.modeling_qwen3", "qwen3_moe.modeling_qwen3_moe", "deepseek3.modeling_deepseek_v3"):
            module = importlib.import_module(f"mindformers.models.{name}")
            if hasattr(module, "get_context"):
                stack.enter_context(mock.patch.object(module, "get_context", {"mode": 0}.get))
        yield


def tiny_qwen3(seed=0, **keys):
    """Returns a Qwen3 as MindFormers trains it, of the sizes in TINY, with random weights."""
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM

    with mcore_context():
        return filled(for_a_cpu(TrainingQwen3ForCausalLM(Qwen3Config(**{**TINY, **keys}))), seed)


def tiny_classifier(family, head, labels, **keys):
    """Returns a classifier on the model of a key of SIZES, ``family``, without values of its own.

    ``head`` is "ForSequenceClassification" or "ForTokenClassification".
    """
    from mindlora.training.classifier import model as classifiers

    module, config = CONFIGS[family]
    config = getattr(importlib.import_module(f"mindformers.models.{module}"), config)
    kind = getattr(classifiers, ARCHITECTURES[family].replace("ForCausalLM", head))
    with mcore_context():
        return for_a_cpu(kind(config(**{**SIZES[family], "num_labels": labels, **keys})))


def tiny_qwen3_moe(seed=0, **keys):
    """Returns a Qwen3-MoE of one layer with four experts, with random weights."""
    from mindformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from mindformers.models.qwen3_moe.modeling_qwen3_moe_train import TrainingQwen3MoeForCausalLM

    with mcore_context():
        config = Qwen3MoeConfig(**{**SIZES["qwen3_moe"], **keys})
        return filled(for_a_cpu(TrainingQwen3MoeForCausalLM(config)), seed)


def tiny_deepseek_v3(seed=0, **keys):
    """Returns a DeepSeek-V3 of one layer with four routed experts and a shared one, with random weights."""
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.deepseek3.modeling_deepseek_v3_train import TrainingDeepseekV3ForCausalLM

    with mcore_context():
        config = DeepseekV3Config(**{**SIZES["deepseek_v3"], **keys})
        return filled(for_a_cpu(TrainingDeepseekV3ForCausalLM(config)), seed)


# A key of SIZES -> the function that makes the network.
MAKE = {"qwen3": tiny_qwen3, "qwen3_moe": tiny_qwen3_moe, "deepseek_v3": tiny_deepseek_v3}


def with_adapters(network, **pet):
    """Returns mindlora's wrapper around an mcore model, as MindFormers makes it of these keys of a pet_config."""
    from mindlora.run.checks.pet_config import PetLoraConfig
    from mindlora.training.model.pet import lora_model

    config = PetLoraConfig.from_pet_config({"pet_type": "lora", **pet})
    network.config.pet_config = config
    return lora_model(config, network)


def save_for_transformers(network, folder, **keys):
    """Saves a tiny_qwen3 as a folder of transformers; ``keys`` are more of its config.json. Returns the folder."""
    from safetensors.numpy import save_file

    from mindlora.files.base.convert import convert_base

    model_config = {
        **TINY,
        "model_type": "qwen3",
        "num_hidden_layers": len(network.model.decoder.layers),
        "tie_word_embeddings": keys.get("tie_word_embeddings", False),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays(network), str(folder / "mcore.safetensors"))
    parts = {"heads": 4, "kv_heads": 2, "model_config": model_config}
    convert_base(str(folder / "mcore.safetensors"), str(folder / "hf"), "mcore", "hf", **parts)
    path = folder / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **keys}), encoding="utf-8")
    return folder / "hf"


def keys_of_folder(folder):
    """Returns the model_config of MindFormers for a folder of transformers, as it runs on a CPU."""
    from mindlora.models.architectures.hugging_face import HuggingFaceConfig
    from mindlora.models.architectures.registry import by_hugging_face_type

    path = folder / "config.json"
    config = HuggingFaceConfig(str(path), json.loads(path.read_text(encoding="utf-8")))
    keys = by_hugging_face_type(config.model_type).from_hugging_face(config)
    return {**keys, **IN_FLOAT32}


def for_a_cpu(network):
    """Puts mindlora's cells for a CPU into an mcore model, in place; returns the network."""
    from mindlora.training.model.mcore_cpu_cells import use_mcore_cpu_cells

    use_mcore_cpu_cells(network)
    return network


@contextlib.contextmanager
def in_training():
    """Lets MindFormers build the networks that it trains, while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_MODE", "train")
        yield


def filled(network, seed):
    """Fills a network's weights with random values, which depend on their names alone; returns the network."""
    for parameter in network.get_parameters():
        if "Float" not in str(parameter.dtype):
            continue  # MindFormers 1.8 keeps the state of a dropout as whole numbers.
        rng = np.random.default_rng([seed, *parameter.name.encode()])
        values = rng.normal(size=parameter.shape, scale=0.3 if len(parameter.shape) > 1 else 0.1)
        parameter.set_data(Tensor((values + (len(parameter.shape) == 1)).astype(np.float32)))
    return network


def scaled(network, factor):
    """Multiplies a network's matrices, in place; returns the network."""
    for parameter in network.get_parameters():
        if len(parameter.shape) > 1:
            parameter.set_data(parameter * factor)
    return network


def tokens(rows=2, length=TINY["seq_length"], seed=0):
    """Returns random token ids, int32 [rows, length], none of which is padding."""
    return np.random.default_rng(seed).integers(1, TINY["vocab_size"], (rows, length)).astype(np.int32)


def arrays(network):
    """Returns name -> copy of the values of each parameter."""
    return {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}


class Loss(nn.Cell):
    """The language model's loss, of the losses that an mcore model returns."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, input_ids, labels):
        return self.network(input_ids, labels=labels)[0]


def train(network, steps, rate=1e-2):
    """Trains what requires a gradient on five batches in turn, and returns the losses."""
    step = nn.TrainOneStepCell(Loss(network), nn.AdamWeightDecay(network.trainable_params(), rate))
    step.set_train(True)
    batches = [(Tensor(ids), Tensor(np.roll(ids, -1, 1))) for ids in (tokens(seed=seed) for seed in range(5))]
    return np.array([float(step(*batches[number % 5]).asnumpy().sum()) for number in range(steps)])


def tiny_config(data, epochs, callbacks, pet, model_type="qwen3", **changes):
    """Returns the content of a YAML that trains adapters on a model of one of SIZES, through mindlora-run.

    Args:
        data (str): MindRecord to train on, as tiny_runs.write_data writes it.
        epochs (int): Epochs.
        callbacks (list of dict): Callbacks after a loss monitor.
        pet (dict): pet_config, without pet_type.
        model_type (str): A key of SIZES.
        **changes: Replaced top-level nodes.
    """
    config = tiny_runs.tiny_config(data, epochs, callbacks, use_legacy=False, **changes)
    model = {"model_type": model_type, "architectures": ARCHITECTURES[model_type], **SIZES[model_type]}
    config["model"] = {
        "model_config": {**model, "pad_token_id": tiny_runs.PAD, "pet_config": {"pet_type": "lora", **pet}}
    }
    return config
