"""A second architecture is one record: names, targets, sizes and checkpoints follow."""

import numpy as np
import pytest

from mindlora.core.errors import TargetError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.files import read, write
from mindlora.files.base.convert import convert_base
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture, JoinedCell, Names
from mindlora.models.architectures.joined_rows import RowsInTurn
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import select_quantized, select_targets
from mindlora.run.checks.targets import check_targets
from mindlora.run.yaml_run import YamlRun


def toy_sizes(model_config):
    hidden = model_config["width"]
    return {"net.0.mix.left": (hidden, hidden), "net.0.mix.right": (hidden, hidden), "net.out": (7, hidden)}


TOY = Architecture(
    title="Toy",
    model_types=("ToyForCausalLM",),
    cells=(Names("mixer.l_proj", "mix.left", "toy_fc"), Names("mixer.r_proj", "mix.right")),
    parameters=(Names("ln.scale", "norm.gamma"),),
    embedding=Names("net.wte", "net.words"),
    embedding_weight=Names("weight", "table"),
    output_head=Names("head", "net.out"),
    joined=(JoinedCell("both", ("left", "right"), RowsInTurn(2)),),
    computed=(".mask",),
    linear_sizes=toy_sizes,
    parameter_sizes=lambda model_config: {},
)
TOY_PATHS = ["net.0.mix.left", "net.0.mix.right", "net.out"]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(registry, "ARCHITECTURES", (LLAMA, TOY))


def test_names():
    assert names.to_hugging_face("net.0.mix.left") == "net.0.mixer.l_proj"
    assert names.to_mindformers("net.0.mixer.r_proj") == "net.0.mix.right"
    assert (names.to_hugging_face("net.out"), names.to_mindformers("head")) == ("head", "net.out")
    assert names.parameter_to_mindformers("net.0.ln.scale") == "net.0.norm.gamma"
    assert names.parameter_to_hugging_face("net.words.table") == "net.wte.weight"
    assert names.parameter_to_hugging_face("net.out.weight") == "head.weight"
    assert names.parameter_to_mindformers("net.0.mixer.l_proj.bias") == "net.0.mix.left.bias"
    assert names.aliases("net.0.mix.left") == ("net.0.mix.left", "net.0.mixer.l_proj")
    assert names.belongs_to("net.words.table", "wte") and not names.belongs_to("net.words.table", "mixer")
    # The first architecture is unchanged.
    assert names.to_hugging_face("model.layers.0.attention.wq") == "model.layers.0.self_attn.q_proj"
    assert registry.titles() == "Llama and Qwen2, Toy"


def test_what_a_cell_is():
    assert names.joined_parts("net.0.mix.both") == ["net.0.mix.left", "net.0.mix.right"]
    assert names.joined_cell("net.0.mix.both").layout.groups([3, 3], None) == 3
    assert names.is_output_head("net.out") and names.is_output_head("head") and names.is_output_head("lm_head")
    assert names.is_embedding("net.words") and not names.is_embedding("net.0.mix.left")
    assert names.embeddings() == ["model.tok_embeddings", "net.words"]
    assert names.output_heads() == ["lm_head", "net.out"]
    assert [names.is_linear(path) for path in (*TOY_PATHS, "net.0.mix.both", "net.words")] == [True] * 4 + [False]
    assert names.is_computed("net.0.mask") and not names.is_computed("net.0.norm.gamma")
    assert names.mcore_to_mindformers("net.0.toy_fc") == "net.0.mix.left" == names.to_mindformers("net.0.toy_fc")
    assert names.to_mcore("net.0.mixer.l_proj") == "net.0.toy_fc"
    with pytest.raises(KeyError):
        names.joined_cell("net.0.mix.left")


def test_targets_and_sizes():
    assert select_targets(TOY_PATHS, "all-linear") == TOY_PATHS[:2]
    assert select_targets(TOY_PATHS, ["r_proj"]) == ["net.0.mix.right"]
    assert select_quantized(TOY_PATHS) == TOY_PATHS[:2]
    with pytest.raises(TargetError, match="net.0.mix.both holds left, right in one cell"):
        select_targets(["net.0.mix.both"], ["l_proj"])
    assert registry.by_model_type("ToyForCausalLM").linear_sizes({"width": 4})["net.out"] == (7, 4)
    assert registry.by_model_type("Unknown") is None
    config = {"model": {"arch": {"type": "ToyForCausalLM"}, "model_config": {"width": 4}}}
    found = check_targets(YamlRun(config), LoraConfig(target_modules=["l_proj"], lora_rank=2))
    assert "LoRA on 1 cells, 16 parameters" in str(found[0])


def test_a_base_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {
        "net.wte.weight": (7, 4),
        "net.0.ln.scale": (4,),
        "net.0.mixer.l_proj.weight": (3, 4),
        "net.0.mixer.r_proj.weight": (3, 4),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    source, there, back = (str(tmp_path / name) for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
    write_arrays(source, {**arrays, "net.0.mask": np.zeros(2, np.float32)})
    report = convert_base(source, there, "hf", "mindformers", concat=True)
    assert report.skipped == ("net.0.mask",)
    with BaseCheckpoint(there) as base:
        assert base.architecture is TOY
        # The embeddings are tied, so the head is a copy.
        assert set(base.tensors) == {"net.words.table", "net.0.norm.gamma", "net.0.mix.both.weight", "net.out.weight"}
        np.testing.assert_array_equal(
            base.read_rows("net.0.mix.both.weight", 0, 6)[::2], arrays["net.0.mixer.l_proj.weight"]
        )
    convert_base(there, back, "mindformers", "hf", tied=True)
    with BaseCheckpoint(back) as base:
        assert set(base.tensors) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(base.read_rows(name, 0, len(array)), array)


def test_an_adapter(tmp_path):
    rng = np.random.default_rng(0)
    pair = {("net.0.mix.both", "A"): rng.normal(size=(2, 4)), ("net.0.mix.both", "B"): rng.normal(size=(6, 2))}
    adapter = Adapter({key: array.astype(np.float32) for key, array in pair.items()}, {"net.0.mix.both": 2.0})
    write(adapter, str(tmp_path / "a.ckpt"), "ckpt")
    convert_adapter(str(tmp_path / "a.ckpt"), str(tmp_path / "peft"), "peft")
    found = read(str(tmp_path / "peft"))
    assert found.paths == TOY_PATHS[:2]
    np.testing.assert_array_equal(found.tensors["net.0.mix.right", "B"], adapter.tensors["net.0.mix.both", "B"][1::2])
    convert_adapter(str(tmp_path / "peft"), str(tmp_path / "b.ckpt"), "ckpt", heads=Heads(), concatenate=True)
    again = read(str(tmp_path / "b.ckpt"))
    assert again.paths == ["net.0.mix.both"]
    np.testing.assert_array_equal(again.tensors["net.0.mix.both", "B"], adapter.tensors["net.0.mix.both", "B"])
