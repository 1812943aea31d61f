"""mindlora eva: what it prints goes into the YAML, and the run begins with its adapter, whose output is zero."""

import json

import numpy as np
import pytest
import yaml

from mindlora.files.adapters import files
from tests.e2e.conftest import TWO_STEPS
from tests.support.runs import LORA_YAML, SIZE_FLAGS, launch, python, succeeded
from tests.support.what_runs import shows


@pytest.fixture(scope="module")
def made(data, base, tmp_path_factory):
    """The folder in which the command ran, and its report."""
    folder = tmp_path_factory.mktemp("eva")
    flags = ["--train_dataset_dir", data.train, "--load_checkpoint", base, *SIZE_FLAGS]
    options = ["--output", "first", "--rows", "16", "--json", *flags]
    output = succeeded(python(["-m", "mindlora.cli", "eva", LORA_YAML, *options], folder))
    return folder, json.loads(output.splitlines()[-1])


@shows("eva", "llama")
def test_a_run_trains_the_adapter_that_the_command_made(made, data, base):
    folder, report = made
    with open(LORA_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    config["model"]["model_config"]["pet_config"].update(report["keys"])
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    flags = ("--train_dataset_dir", data.train, "--load_checkpoint", base)
    succeeded(launch(folder, *flags, *TWO_STEPS, config=str(folder / "run.yaml")))
    first, trained = files.read(str(folder / "first")), files.read(str(folder / "output" / "lora_checkpoint" / "best"))
    with_rank = [path for path, rank in report["ranks"].items() if rank]
    assert sorted(first.paths) == sorted(trained.paths) == sorted(with_rank)
    for path in first.paths:
        assert trained.rank(path) == report["ranks"][path] and trained.scale(path) == first.scale(path)
        assert not first.tensors[path, "B"].any() and trained.tensors[path, "B"].any()
        # In a step, Adam moves an element by about 0.01.
        np.testing.assert_allclose(trained.tensors[path, "A"], first.tensors[path, "A"], atol=0.03)
