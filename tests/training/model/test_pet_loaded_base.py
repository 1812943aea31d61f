"""adapter_path on another base than its own: refused once load_checkpoint is loaded, before the first step."""

import types
import warnings

import mindspore as ms
import pytest

from mindlora import LoraConfig, apply_lora, save_lora
from mindlora.core.errors import BaseMismatchError, ConfigError
from mindlora.data import tokenizers
from mindlora.files.adapters import files as adapter_files
from mindlora.network.tree import lora_cells, weight_of
from mindlora.run.checks.pet_config import PetLoraConfig
from tests.support.networks import randomize
from tests.support.runs import LORA_YAML, SEQUENCE, SIZES, files, launch_refused, write_rows

KEYS = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ".*wq|.*w2"}
PET = "--model.model_config.pet_config"


@pytest.fixture(scope="module")
def tiny(mindformers):
    """Returns a function that builds the network of the tiny YAML, with a vocabulary for bytes."""

    def build():
        from mindformers.tools.register import MindFormerConfig

        model = MindFormerConfig(LORA_YAML).model.model_config
        model.update(SIZES, vocab_size=270)
        for key in ("pet_config", "type"):
            model.pop(key)
        return mindformers.LlamaForCausalLM(mindformers.LlamaConfig(**model))

    return build


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Two checkpoints, ``own`` and ``other``; an adapter of the first, and the same without a fingerprint."""
    folder = tmp_path_factory.mktemp("bases")
    paths = types.SimpleNamespace(folder=folder, **{n: str(folder / n) for n in ("marked", "unmarked")})
    for name in ("other", "own"):
        network = tiny()
        randomize(network.get_parameters(), seed=len(name))
        for parameter in network.get_parameters():
            parameter.set_data(ms.Tensor(0.2 * parameter.asnumpy()))
        setattr(paths, name, str(folder / f"{name}.ckpt"))
        ms.save_checkpoint(network, getattr(paths, name))
    apply_lora(network, LoraConfig(**KEYS))
    randomize([p for p in network.trainable_params() if "mindpet" in p.name])
    save_lora(network, paths.marked)
    adapter = adapter_files.read(paths.marked)
    adapter.fingerprint = None
    adapter_files.write(adapter, paths.unmarked)
    return paths


@pytest.fixture
def model(tiny):
    """Returns a function that builds MindloraModel as a run does: first the adapter, then the base."""

    def build(adapter, base, without_values=True, **keys):
        from mindformers.pet import get_pet_model
        from mindspore.nn.utils import no_init_parameters

        from mindlora.training.launch import hooks  # noqa: F401

        pet = {"pet_type": "lora", **KEYS, "adapter_path": adapter, **keys}
        if without_values:
            with no_init_parameters():
                found = get_pet_model(tiny(), pet)
        else:
            found = get_pet_model(tiny(), pet)
        assert not ms.load_param_into_net(found, ms.load_checkpoint(base))[1]
        return found.network

    return build


@pytest.mark.parametrize(
    "adapter, base, keys", [("marked", "own", {}), ("unmarked", "other", {}), ("marked", "other", "ignore")]
)
def test_nothing_is_said_of_its_own_base_nor_of_what_cannot_be_told(adapter, base, keys, made, model, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = {"on_base_mismatch": keys} if keys else {}
        model(getattr(made, adapter), getattr(made, base), **keys).check_loaded_base()
    assert "base has no values" not in caplog.text


def test_another_base_is_an_error_that_names_both(made, model):
    network = model(made.marked, made.other)
    with pytest.raises(BaseMismatchError) as caught:
        network.check_loaded_base()
    marks = [adapter_files.read(made.marked).fingerprint["values"], caught.value.found["values"]]
    assert marks[0] != marks[1] and str(caught.value).startswith(
        f"adapter_path: {made.marked} was trained on another base: the adapted weights have other values (another "
        "checkpoint, or another dtype). Load the base checkpoint it was trained on. Its fingerprint of the base is "
        f"{marks[0]}, and that of load_checkpoint: "
    )
    assert f" is {marks[1]}. If this base is meant, set pet_config.on_base_mismatch: warn." in str(caught.value)


def test_or_a_warning(made, model):
    network = model(made.marked, made.other, on_base_mismatch="warn")
    with pytest.warns(UserWarning, match="marked was trained on another base"):
        network.check_loaded_base()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.check_loaded_base()  # once is enough
    with pytest.raises(ConfigError, match="on_base_mismatch is 'no': it must be one of error, warn, ignore"):
        PetLoraConfig(target_modules=["wq"], on_base_mismatch="no")


def test_a_base_with_values_is_compared_when_the_network_is_built(made, model):
    with pytest.warns(UserWarning, match="was trained on another base"):
        network = model(made.marked, made.other, without_values=False)
    network.check_loaded_base()


def test_parts_of_a_base_are_not_compared(made, model, monkeypatch):
    network, said = model(made.marked, made.other), []
    for _, cell in lora_cells(network):
        weight = weight_of(cell)
        weight.set_data(ms.Tensor(weight.asnumpy()[:8]), slice_shape=True)
    monkeypatch.setattr("mindlora.training.model.pet.logger.info", lambda text, *values: said.append(text % values))
    network.check_loaded_base()
    assert said == [f"{made.marked}: each device has a part of the base, which was not compared."]


# Through mindlora-run


@pytest.fixture(scope="module")
def ended(made, tmp_path_factory):
    """Name of a run -> its exit code, stderr and folder."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizers.train_tokenizer(["one two three four"], 270, str(folder / "tokenizer"))
    write_rows(folder / "train.mindrecord", rows=8)
    write_rows(folder / "eval.mindrecord", rows=4, length=SEQUENCE)
    modes = {
        "finetune": ["--train_dataset_dir", folder / "train.mindrecord", "--batch_size", "4", "--epochs", "1"],
        "eval": ["--eval_dataset_dir", folder / "eval.mindrecord", "--batch_size", "4"],
        "predict": [
            *("--predict_data", "one two", "--model.model_config.max_decode_length", "8"),
            *("--processor.tokenizer.tokenizer_file", folder / "tokenizer" / "tokenizer.json"),
        ],
    }
    pet = [
        word for key, value in {**KEYS, "adapter_path": made.marked}.items() for word in (f"{PET}.{key}", str(value))
    ]
    launches = {
        f"{mode} on {base}": [
            *("--run_mode", mode, "--load_checkpoint", getattr(made, base), "--model.model_config.vocab_size", "270"),
            *flags,
            *pet,
        ]
        for mode, flags in modes.items()
        for base in ("other", *(["own"] if mode == "predict" else []))
    }
    found, _ = launch_refused(folder, *launches.values())
    return {name: (*end, folder / str(number)) for number, (name, end) in enumerate(zip(launches, found))}


@pytest.mark.parametrize("run_mode", ["finetune", "eval", "predict"])
def test_a_run_stops_before_it_begins(run_mode, ended, made):
    code, stderr, output = ended[f"{run_mode} on other"]
    (line,) = [line for line in stderr.splitlines() if line.startswith("mindlora-run: ")]
    assert code == 1 and f"error: adapter_path: {made.marked} was trained on another base: " in line
    assert f"and that of load_checkpoint: {made.other} is " in line and not files(output)


def test_and_on_its_own_base_it_answers(ended):
    """That it trains and evaluates there is tested in tests/e2e."""
    code, _, output = ended["predict on own"]
    assert code == 0 and "one two" in (output / "predict_result.txt").read_text()
