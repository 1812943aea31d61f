"""Made once for all end-to-end tests: data, a base checkpoint, and an adapter trained on it through the tiny YAML."""

import shutil
import types

import pytest

from tests.support.runs import BASE_YAML, LORA_YAML, SEQUENCE, SIZES, launch, succeeded, write_rows

TRAINING = ("--batch_size", "4", "--epochs", "2")
# PyNative compiles no graph, which takes three times as long as the rest of a run: for what is computed as graphs do
# that other tests compile, and for what a run in graph mode is compared with.
PYNATIVE = ("--context.mode", "1")
# Where a run's settings and files are looked at.
TWO_STEPS = ("--batch_size", "16", "--epochs", "1", *PYNATIVE)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """MindRecords of counting rows: ``base`` by threes, ``train`` by fives, ``eval`` for MindFormers' evaluation."""
    folder = tmp_path_factory.mktemp("data")
    paths = types.SimpleNamespace(
        base=folder / "base.mindrecord", train=folder / "train.mindrecord", eval=folder / "eval.mindrecord"
    )
    write_rows(paths.base, step=3)
    write_rows(paths.train, step=5)
    paths.eval_rows = write_rows(paths.eval, step=5, rows=8, length=SEQUENCE, seed=1)
    return paths


@pytest.fixture(scope="session")
def base(data, tmp_path_factory):
    """A checkpoint of a tiny Llama that counts by threes."""
    folder = tmp_path_factory.mktemp("base")
    flags = ("--train_dataset_dir", data.base, "--batch_size", "4", "--epochs", "8")
    succeeded(launch(folder, *flags, config=BASE_YAML))
    (written,) = (folder / "output" / "checkpoint" / "rank_0").glob("*.ckpt")
    return shutil.copy(written, folder / "base.ckpt")


@pytest.fixture(scope="session")
def trained(data, base, tmp_path_factory):
    """A run of mindlora-run that teaches the base to count by fives: its folder, output and adapter."""
    folder = tmp_path_factory.mktemp("trained")
    name = ["--model.model_config.pet_config.base_model_name_or_path", "someone/a-base"]
    stdout = succeeded(launch(folder, "--train_dataset_dir", data.train, "--load_checkpoint", base, *TRAINING, *name))
    return types.SimpleNamespace(
        stdout=stdout, output=folder / "output", adapter=folder / "output" / "lora_checkpoint" / "best"
    )


@pytest.fixture(scope="session")
def fresh_network(base, mindformers):
    """Returns a function that builds the tiny network here, with the base loaded and adapters that do nothing.

    Its keys override those of the YAML's pet_config.
    """

    def build(**keys):
        import mindspore as ms
        from mindformers.tools.register import MindFormerConfig

        from mindlora import LoraConfig, apply_lora, freeze_base

        model = MindFormerConfig(LORA_YAML).model.model_config
        model.update(SIZES)
        config = LoraConfig.from_pet_config({**model.pop("pet_config"), **keys})
        model.pop("type")
        network = mindformers.LlamaForCausalLM(mindformers.LlamaConfig(**model))
        missing, _ = ms.load_param_into_net(network, ms.load_checkpoint(str(base)))
        assert not missing
        apply_lora(network, config)
        freeze_base(network)
        return network

    return build
