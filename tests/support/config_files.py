"""The YAMLs of configs/: their paths, their content, and the figures that follow from their sizes."""

import glob
import os

from tests.conftest import ROOT

_ALL = sorted(os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "configs", "*", "*.yaml")))
# Those of MindFormers' mcore models, whose keys and cells are others.
MCORE = [path for path in _ALL if path.startswith(os.path.join("configs", "qwen3"))]
# The quickstart trains with these.
TINY_MCORE = [path for path in _ALL if os.path.basename(path).endswith("_qwen3_tiny_cpu.yaml")]
PATHS = [path for path in _ALL if path not in (*MCORE, *TINY_MCORE)]
ON_ASCEND = [path for path in PATHS if not path.startswith(os.path.join("configs", "tiny"))]
QLORA = os.path.join("configs", "llama2", "qlora_llama2_7b.yaml")
ON_8 = [path for path in ON_ASCEND if path != QLORA]
ATTENTION = {"wq", "wk", "wv", "wo"}
LEAVES = {".*wq|.*wk|.*wv|.*wo": ATTENTION, "all-linear": ATTENTION | {"w1", "w2", "w3"}, None: set()}
SMALL = {
    "seq_length": 16,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
}


def read(path):
    """Returns the text of a YAML."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def load(path):
    """Returns a YAML as MindFormers reads it, defaults filled in."""
    from mindformers.tools.register import MindFormerConfig

    return MindFormerConfig(os.path.join(ROOT, path))


def prepared(path):
    """Returns a YAML with its sizes shrunk, as mindlora-run prepares it."""
    from mindlora.training.launch import preflight

    config = load(path)
    model = config.model.model_config
    model.update({key: value for key, value in SMALL.items() if key in model})
    if model.n_kv_heads:
        model.n_kv_heads = 2
    preflight.prepare(config)
    return config


def target_modules(config):
    """Returns target_modules, or None without pet_config."""
    pet = config.model.model_config.pet_config
    return pet.target_modules if pet else None


def pet_figures(pet):
    """Returns rank, alpha and dropout, from the YAML or the preset that it names."""
    recipe = {"small_dataset": (8, 32, 0.2), "large_dataset": (16, 64, 0.05)}
    if not pet:
        return None, None, None
    return recipe[pet.preset] if pet.preset else (pet.lora_rank, pet.lora_alpha, pet.lora_dropout)


def linear_shapes(model):
    """Returns (out, in) of the linear cells of one layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    key_value = hidden // model.num_heads * (model.n_kv_heads or model.num_heads)
    return {
        "wq": (hidden, hidden),
        "wk": (key_value, hidden),
        "wv": (key_value, hidden),
        "wo": (hidden, hidden),
        "w1": (inner, hidden),
        "w2": (hidden, inner),
        "w3": (inner, hidden),
    }


def base_count(config):
    """Returns the number of weights: embedding, head, linear cells, two norms in each layer and one at the end."""
    model = config.model.model_config
    layer = sum(out * in_ for out, in_ in linear_shapes(model).values()) + 2 * model.hidden_size
    return 2 * model.vocab_size * model.hidden_size + model.num_layers * layer + model.hidden_size


def adapter_count(config):
    """Returns the number of elements of all A [rank, in] and B [out, rank]."""
    model = config.model.model_config
    rank = pet_figures(model.pet_config)[0]
    shapes = linear_shapes(model)
    return model.num_layers * sum(rank * sum(shapes[leaf]) for leaf in LEAVES[target_modules(config)])
