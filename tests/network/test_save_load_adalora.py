"""What AdaLoRA trains, in files: a plain LoRA of the ranks that are left, named where it has none."""

import json

import numpy as np
import pytest
from mindspore import Parameter, Tensor, save_checkpoint

from mindlora import LoraConfig, apply_lora, convert_adapter, inspect_adapter, load_lora, save_lora
from mindlora.core.errors import AdapterFormatError, BaseMismatchError, LoraError, NotFiniteError
from mindlora.files.adapters import files as adapter_files
from mindlora.network.save_load import check_base
from mindlora.network.tree import lora_cells
from tests.support.adapter_samples import CONFIG
from tests.support.networks import TinyModel, adapters, assert_close, normal, randomize
from tests.support.refusals import part, refused_unchanged

PATHS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt"}
WQ, W2 = "model.layers.{}.attention.wq", "model.layers.{}.feed_forward.w2"


def base(seed=5):
    network = TinyModel()
    randomize(network.get_parameters(), seed)
    return network


def model(*kept, seed=5):
    """A network of four cells of init_r 3, in each of which so many triplets are left."""
    network = base(seed)
    apply_lora(network, LoraConfig(use_adalora=True, init_r=3, target_r=1, target_modules=["wq", "w2"]))
    for number, ((_, cell), rank) in enumerate(zip(lora_cells(network), kept)):
        randomize(cell.lora_parameters(), seed=number)
        weights = cell.mindpet_delta_lora_lambda.asnumpy().copy()
        weights[: 3 - rank] = 0
        cell.mindpet_delta_lora_lambda.set_data(Tensor(weights))
    return network


@pytest.mark.parametrize("form", PATHS)
def test_it_loads_as_a_plain_lora_with_the_same_outputs(form, tmp_path):
    network, path = model(3, 1, 2, 0), str(tmp_path / PATHS[form])
    save_lora(network, path, form)
    assert [array.shape for array in adapter_files.read(path).tensors.values()].count((0, 6)) == 0
    fresh = base()
    load_lora(fresh, path, on_base_mismatch="error")
    x = Tensor(normal(4, 6))
    assert_close(fresh(x), network(x).asnumpy())
    assert sorted(cell.lora_rank for _, cell in lora_cells(fresh)) == [1, 2, 3]
    assert "mindpet_delta_lora_lambda" not in "".join(adapters(fresh))


def test_a_cell_without_a_rank_is_left_out_and_named(tmp_path):
    network = model(3, 1, 2, 0)
    without = [path for path, cell in lora_cells(network) if not cell.rank_left]
    save_lora(network, str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    # Full paths, or PEFT would put an adapter on the cell of the same name.
    assert len(config["target_modules"]) == 3 and all("layers." in name for name in config["target_modules"])
    report = inspect_adapter(str(tmp_path / "adapter"))
    assert report.allocation == {"rank": 6, "target": 4, "left_out": without}
    assert f"6 ranks in all, while its budget was still falling to 4\nAdaLoRA        no rank for {without[0]}" in str(
        report
    )
    convert_adapter(str(tmp_path / "adapter"), str(tmp_path / "adapter.ckpt"), "ckpt")
    assert inspect_adapter(str(tmp_path / "adapter.ckpt")).allocation == report.allocation


def test_at_its_target_it_is_saved_as_final(tmp_path):
    save_lora(model(1, 1, 1, 1), str(tmp_path / "adapter"))
    assert "AdaLoRA        4 ranks in all\n" in str(inspect_adapter(str(tmp_path / "adapter")))
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["rank_pattern"], config["target_modules"]) == (1, {}, ["down_proj", "q_proj"])


def test_before_its_first_step_all_of_it_is_saved(tmp_path):
    network = model()
    save_lora(network, str(tmp_path / "adapter"))
    fresh = base()
    load_lora(fresh, str(tmp_path / "adapter"))
    x = Tensor(normal(4, 6))
    assert_close(fresh(x), base()(x).asnumpy())
    assert {cell.lora_rank for _, cell in lora_cells(fresh)} == {3}


def test_a_lambda_of_nan_is_not_saved(tmp_path):
    network = model(3, 3, 3, 3)
    next(cell for _, cell in lora_cells(network)).mindpet_delta_lora_lambda.set_data(Tensor(np.float32([1, np.nan, 0])))
    with pytest.raises(NotFiniteError, match="LoRA tensors with NaN or infinity"):
        save_lora(network, str(tmp_path / "adapter"))


def test_a_file_is_not_loaded_into_cells_whose_ranks_are_open(tmp_path):
    save_lora(model(3, 1, 2, 0), str(tmp_path / "adapter"))
    message = part(f"The network was built with AdaLoRA, whose ranks are not those of a file, so {tmp_path}")
    network = model(3, 1, 2, 0)
    refused_unchanged(network, LoraError, message, load_lora, network, str(tmp_path / "adapter"))


def test_its_base_is_checked_also_where_cells_are_left_out(tmp_path):
    save_lora(model(3, 1, 2, 0), str(tmp_path / "adapter"))
    check_base(model(), str(tmp_path / "adapter"))
    with pytest.raises(BaseMismatchError, match="was trained on another base"):
        check_base(model(seed=6), str(tmp_path / "adapter"))


def test_a_checkpoint_of_the_training_network_is_no_adapter(tmp_path):
    path = str(tmp_path / "network.ckpt")
    parameters = [{"name": p.name, "data": Parameter(p.asnumpy())} for p in model(1, 1, 1, 1).get_parameters()]
    save_checkpoint(parameters, path)
    with pytest.raises(AdapterFormatError, match="is a checkpoint of a run of AdaLoRA, which keeps Lambda apart"):
        adapter_files.read(path)
