"""What adapter convert --to mcore writes, in MindFormers' own LoRA on its mcore Qwen3: the same as mindlora's."""

import numpy as np

from mindlora import load_lora
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.files import write
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import TINY, tiny_qwen3

HIDDEN, INNER, DIM = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
HEADS = Heads(TINY["num_attention_heads"], TINY["num_key_value_heads"], DIM)
CELLS = {
    "attention.wq": (4 * DIM, HIDDEN),
    "attention.wk": (2 * DIM, HIDDEN),
    "attention.wv": (2 * DIM, HIDDEN),
    "attention.wo": (HIDDEN, 4 * DIM),
    "feed_forward.w1": (INNER, HIDDEN),
    "feed_forward.w2": (HIDDEN, INNER),
    "feed_forward.w3": (INNER, HIDDEN),
}


def peft_folder(folder):
    rng, adapter = np.random.default_rng(0), Adapter({})
    for cell, (rows, columns) in CELLS.items():
        path = f"model.layers.0.{cell}"
        adapter.tensors[path, "A"] = rng.normal(size=(2, columns), scale=0.3).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(rows, 2), scale=0.3).astype(np.float32)
        adapter.alphas[path] = 4.0
    write(adapter, str(folder))
    return str(folder)


def with_mindformers_lora(rank, alpha):
    """Returns a Qwen3 with MindFormers' own LoRA."""
    from mindformers.pet.pet_config import LoraConfig
    from mindformers.pet.tuners.lora_adapter import LoraAdapter

    network = tiny_qwen3()
    config = LoraConfig(lora_rank=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=".*linear_.*")
    network.model = LoraAdapter.get_pet_model(network.model, config)
    return network


def test_mindformers_own_lora_reads_it_and_adds_the_same(mindformers, tmp_path):
    source, path = peft_folder(tmp_path / "peft"), str(tmp_path / "mcore.safetensors")
    report = convert_adapter(source, path, "mcore", heads=HEADS)
    with TensorFile(path) as file:
        values = {key: file.read(key) for key in file.tensors}
    theirs = with_mindformers_lora(report.ranks[0], report.alphas[0])
    own = {
        p.name.removeprefix("model."): p
        for p in theirs.get_parameters()
        if "lora_" in p.name and "dropout" not in p.name
    }
    assert {name: tuple(p.shape) for name, p in own.items()} == {name: array.shape for name, array in values.items()}
    added = {
        name.removeprefix("model."): cell.scaling * values[key + "lora_B.weight"] @ values[key + "lora_A.weight"]
        for name, cell in theirs.cells_and_names()
        if hasattr(cell, "scaling") and (key := name.removeprefix("model.") + ".")
    }
    ours = tiny_qwen3()
    load_lora(ours, source)
    for name, cell in lora_cells(ours):
        a, b = cell.pair()
        np.testing.assert_allclose(added.pop(name.removeprefix("model.")), cell.scale * b @ a, rtol=1e-5, atol=1e-6)
    assert not added
