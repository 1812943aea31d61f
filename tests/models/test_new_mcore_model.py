"""A new mcore model is one record and one line in the registry: names, YAML checks, plan, doctor and files follow."""

import json

import numpy as np
import pytest
import yaml

from mindlora.cli import main
from mindlora.core.errors import ConfigError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.files.base.convert import convert_base
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture, Attention, JoinedCell, Names, ParameterSize
from mindlora.models.architectures.joined_rows import PartAfterPart
from mindlora.models.lora_config import LoraConfig
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.checks.targets import check_targets
from mindlora.run.plan.memory import kv_cache_per_token
from mindlora.run.plan.run import read_run
from mindlora.run.yaml_run import YamlRun

HIDDEN, INNER, VOCABULARY, LAYERS = 8, 12, 20, 2
# End of a path in mcore -> (out, in) in each layer.
CELLS = {
    "mixer.pull": (3 * HIDDEN, HIDDEN),
    "mixer.push": (HIDDEN, HIDDEN),
    "bulk.grow": (INNER, HIDDEN),
    "bulk.shrink": (HIDDEN, INNER),
}
MCORE_PATHS = [f"decoder.layers.{layer}.{cell}" for layer in range(LAYERS) for cell in CELLS]


def linear_sizes(model_config):
    cells = {path: CELLS[path.split(".", 3)[3]] for path in MCORE_PATHS}
    return {**cells, "output_layer": (VOCABULARY, HIDDEN)}


def parameter_sizes(model_config):
    shapes = {f"{path}.weight": size for path, size in linear_sizes(model_config).items()}
    shapes |= {f"decoder.layers.{layer}.mixer.scale.weight": (HIDDEN,) for layer in range(LAYERS)}
    shapes["embedding.acorns.weight"] = (VOCABULARY, HIDDEN)
    return {name: ParameterSize(shape, "float32") for name, shape in shapes.items()}


def attention(model_config, cells):
    return Attention(2, cells["w_qkv"][0] // 3, HIDDEN, cells["wo"][1], 5, True)


ACORN = Architecture(
    title="Acorn",
    model_types=("AcornForCausalLM", "AcornConfig"),
    cells=(
        Names("mix.q", "mix.query", "mixer.pull_q"),
        Names("mix.k", "mix.key", "mixer.pull_k"),
        Names("mix.v", "mix.value", "mixer.pull_v"),
        Names("mix.out", "mix.finish", "mixer.push"),
        Names("ffn.up", "ffn.wide", "bulk.grow"),
        Names("ffn.down", "ffn.narrow", "bulk.shrink"),
    ),
    parameters=(Names("mix.norm.weight", "mix.gain.weight", "mixer.scale.weight"),),
    embedding=Names("model.acorns", "model.tok_acorns", "embedding.acorns"),
    embedding_weight=Names("weight", "table", "weight"),
    output_head=Names("lm_head", "lm_head", "output_layer"),
    joined=(JoinedCell("pull", ("query", "key", "value"), PartAfterPart(3), "pull"),),
    computed=(".phase",),
    linear_sizes=linear_sizes,
    parameter_sizes=parameter_sizes,
    roles={"pull": "w_qkv", "finish": "wo", "wide": "w1", "narrow": "w2", "gain": "attention_norm"},
    attention=attention,
    cache_blocks=3,
    caches_in_training=True,
    unsupported=lambda model_config: "rings is odd. Set rings: 2." if model_config.get("rings") == 1 else None,
    expert_bias=True,
    hugging_face_types=("acorn",),
    legacy=False,
)


@pytest.fixture(autouse=True)
def acorn(monkeypatch):
    monkeypatch.setattr(registry, "ARCHITECTURES", (*registry.ARCHITECTURES, ACORN))


@pytest.fixture
def write_yaml(tmp_path):
    """Returns a function that writes the YAML of a run on the model, and returns its path."""

    def write(callbacks=(), **model):
        pet_config = {"pet_type": "lora", "lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear"}
        config = {
            "use_legacy": False,
            "run_mode": "finetune",
            "context": {"mode": 0, "device_target": "Ascend"},
            "callbacks": list(callbacks),
            "model": {"model_config": {"model_type": "acorn", "seq_length": 4, **model, "pet_config": pet_config}},
        }
        path = tmp_path / "acorn.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    return write


def content(path):
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def test_names_are_converted_both_ways():
    assert names.to_hugging_face("decoder.layers.1.bulk.grow") == "model.layers.1.ffn.up"
    assert names.to_mcore("model.layers.1.ffn.up") == "decoder.layers.1.bulk.grow"
    assert names.to_mindformers("decoder.layers.1.mixer.pull") == "model.layers.1.mix.pull"
    assert names.parameter_to_hugging_face("embedding.acorns.weight") == "model.acorns.weight"
    assert names.parameter_to_mcore("model.layers.0.mix.norm.weight") == "decoder.layers.0.mixer.scale.weight"
    assert [names.role_of(path) for path in MCORE_PATHS[:4]] == ["w_qkv", "wo", "w1", "w2"]
    ends = {"decoder.layers.0.mixer.scale": "attention_norm", "embedding.acorns": "tok_embeddings"}
    assert {path: names.role_of(path) for path in ends} == ends


def test_a_yaml_of_it_is_let_through_and_what_its_record_refuses_is_refused(write_yaml):
    assert not list(check_mcore(YamlRun(content(write_yaml()))))
    assert not list(check_mcore(YamlRun(content(write_yaml(model_type="", architectures=["AcornForCausalLM"])))))
    with pytest.raises(ConfigError, match="^rings is odd. Set rings: 2.$"):
        refuse(check_mcore(YamlRun(content(write_yaml(rings=1)))))
    with pytest.raises(ConfigError, match="^callbacks has TopkBiasBalanceCallback"):
        refuse(check_mcore(YamlRun(content(write_yaml(callbacks=[{"type": "TopkBiasBalanceCallback"}])))))
    with pytest.raises(ConfigError, match="trains adapters on .*, AcornForCausalLM[.]"):
        refuse(check_mcore(YamlRun(content(write_yaml(model_type="oak")))))


def test_the_doctor_knows_its_cells(write_yaml):
    config = content(write_yaml())
    sizes = sum(rows + columns for rows, columns in CELLS.values())
    (finding,) = check_targets(YamlRun(config), LoraConfig(target_modules="all-linear", lora_rank=2))
    assert finding.found.startswith(f"LoRA on {len(MCORE_PATHS)} cells, {2 * LAYERS * sizes:,} parameters: decoder.")
    (finding,) = check_targets(YamlRun(config), LoraConfig(target_modules=["mix.q"], lora_rank=2))
    assert finding.severity == "error" and "mixer.pull holds q, k, v in one cell" in finding.found


def test_it_is_planned(write_yaml, capsys):
    path = write_yaml()
    assert main(["plan", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "Acorn"
    assert report["trained"] == 2 * LAYERS * sum(rows + columns for rows, columns in CELLS.values())
    assert report["adapter_file"] > 4 * report["trained"]
    run = read_run(content(path))
    assert run.attention == Attention(2, HIDDEN, HIDDEN, HIDDEN, 5, True)
    # It caches while it trains, in blocks of 16 tokens.
    assert run.cache_tokens == 3 * 16 and kv_cache_per_token(run) == LAYERS * 5 * 2


def test_a_checkpoint_is_converted_there_and_back(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"model.acorns.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.mix.{end}.weight": (HIDDEN, HIDDEN) for end in ("q", "k", "v", "out")}
        shapes |= {f"{start}.ffn.up.weight": (INNER, HIDDEN), f"{start}.ffn.down.weight": (HIDDEN, INNER)}
        shapes[f"{start}.mix.norm.weight"] = (HIDDEN,)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    source, there, back = (str(tmp_path / f"{name}.safetensors") for name in ("hf", "mcore", "back"))
    write_arrays(source, tensors)
    convert_base(source, there, "hf", "mcore")
    with BaseCheckpoint(there) as base:
        assert base.architecture is ACORN
        assert {name: info.shape for name, info in base.tensors.items()} == {
            name: size.shape for name, size in parameter_sizes({}).items()
        }
        parts = [tensors[f"model.layers.1.mix.{part}.weight"] for part in "qkv"]
        joined = base.read_rows("decoder.layers.1.mixer.pull.weight", 0, 3 * HIDDEN)
        np.testing.assert_array_equal(joined, np.concatenate(parts))
    convert_base(there, back, "mcore", "hf")
    with BaseCheckpoint(back) as base:
        assert set(base.tensors) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(base.read_rows(name, 0, len(tensor)), tensor)
