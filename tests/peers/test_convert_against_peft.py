"""Without networks: PEFT's adapters converted to other formats and back, bit for bit; PEFT loads the result."""

import pytest

from mindlora.files.adapters import files as adapter_files
from mindlora.files.base.convert import convert_base
from mindlora.models import names
from tests.support.peers import cases
from tests.support.peers.peer import stored


@pytest.fixture(params=cases.ADAPTERS)
def name(request):
    return request.param


def read(name, made):
    """Reads an adapter that PEFT made."""
    return adapter_files.read(str(made.adapters[name]), allow_pickle=not cases.ADAPTERS[name]["safetensors"])


def assert_peft_has_the_same(written, name, peer, made):
    """Asserts that PEFT loads ``written`` as the adapter that it made: keys, dtypes, bits, ranks and scales."""
    assert stored(written / cases.WEIGHTS) == stored(made.safetensors[name] / cases.WEIGHTS)
    model = made.models[cases.ADAPTERS[name]["model"]]
    assert peer.describe(model=model, adapter=written) == peer.describe(model=model, adapter=made.adapters[name])


def test_read_as_peft_means_it(name, peer, made):
    """Each cell has the rank, alpha and scale that PEFT derives from the same configuration."""
    adapter = read(name, made)
    described = peer.describe(model=made.models[cases.ADAPTERS[name]["model"]], adapter=made.adapters[name])
    assert {
        names.to_hugging_face(path): [adapter.rank(path), adapter.alphas[path], pytest.approx(adapter.scale(path))]
        for path in adapter.paths
    } == described
    assert adapter.dropout == 0.1  # in all cases
    assert adapter.use_rslora == cases.ADAPTERS[name]["config"].get("use_rslora", False)


def test_read_and_written_again(name, peer, made, tmp_path):
    adapter = read(name, made)
    adapter_files.write(adapter, str(tmp_path / "again"), to="peft")
    assert_peft_has_the_same(tmp_path / "again", name, peer, made)


@pytest.mark.parametrize("form, file", [("ckpt", "adapter.ckpt"), ("mindformers", "adapter.safetensors")])
def test_through_the_forms_of_mindformers(name, form, file, peer, made, tmp_path):
    adapter_files.write(read(name, made), str(tmp_path / file), to=form)
    adapter_files.write(adapter_files.read(str(tmp_path / file)), str(tmp_path / "again"), to="peft")
    assert_peft_has_the_same(tmp_path / "again", name, peer, made)


@pytest.mark.parametrize("model", cases.MODELS)
def test_base_is_bit_equal(model, made, checkpoints):
    """The converted base holds what transformers saved, in one file or in several, under MindFormers' names."""
    expected = weights_of(made.models[model])
    assert stored(checkpoints(model)) == {names.parameter_to_mindformers(key): value for key, value in expected.items()}
    assert ("lm_head.weight" in expected) == (model != "tied")
    assert (len(list(made.models[model].glob("*.safetensors"))) > 2) == (model == "grouped")


@pytest.mark.parametrize("concat", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("model", cases.MODELS)
def test_base_goes_back(model, concat, made, checkpoints, tmp_path):
    sizes = cases.MODELS[model][1]
    convert_base(
        str(checkpoints(model, concat)),
        str(tmp_path / "again"),
        "mindformers",
        "hf",
        tied=model == "tied",
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
    )
    assert weights_of(tmp_path / "again") == weights_of(made.models[model])


def weights_of(folder):
    """Returns the tensors of all files of a model."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(stored(file))
    return found
