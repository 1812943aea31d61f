"""mindlora eva refuses a YAML that it cannot use before it builds anything."""

import numpy as np
import pytest
from mindspore.mindrecord import FileWriter

from mindlora.core.errors import LoraError
from tests.support.runs import LORA_YAML, SEQUENCE, SIZE_FLAGS, write_rows


@pytest.fixture
def refused(mindformers, tmp_path):
    """Returns a function that gives the message with which a command line is refused."""
    from mindlora.training.launch.eva import eva_of

    def message(*overrides, config=LORA_YAML, **settings):
        settings = {"rows": 8, "batch_size": 4, "rho": 2.0, "tau": 0.99, **settings}
        with pytest.raises(LoraError) as caught:
            eva_of(config, [*SIZE_FLAGS, *map(str, overrides)], **settings)
        return str(caught.value)

    return message


def write_packed(path):
    writer = FileWriter(str(path), 1)
    column = {"type": "int32", "shape": [SEQUENCE + 1]}
    writer.add_schema({"input_ids": column, "labels": column, "boundary": column}, "packed")
    row = np.ones(SEQUENCE + 1, np.int32)
    writer.write_raw_data([{"input_ids": row, "labels": row, "boundary": row}])
    writer.commit()


def test_data_that_cannot_be_read_as_whole_rows(refused, tmp_path):
    assert "names no MindRecord that is there" in refused("--train_dataset_dir", tmp_path / "nowhere")
    write_rows(tmp_path / "short.mindrecord", length=SEQUENCE - 2)
    short = refused("--train_dataset_dir", tmp_path / "short.mindrecord")
    assert f"has {SEQUENCE - 2} tokens, but seq_length is {SEQUENCE}. Set --seq_length {SEQUENCE - 2}" in short
    write_packed(tmp_path / "packed.mindrecord")
    assert "are packed, and EVA reads whole rows" in refused("--train_dataset_dir", tmp_path / "packed.mindrecord")


def test_labels_of_an_mcore_model_may_be_those_of_the_next_token(mindformers, tmp_path):
    """Rows of seq_length have labels that belong to the tokens one by one, longer ones labels of the same token."""
    from mindlora.run.yaml_run import YamlRun
    from mindlora.training.launch.eva import batches_of

    labels = np.array([[-100, -100, 5, 6, -100, 8]], np.int32)
    counted = {}
    for name, width in (("shifted", 5), ("same", 6)):
        path = tmp_path / f"{name}.mindrecord"
        writer = FileWriter(str(path), 1)
        column = {"type": "int32", "shape": [width]}
        writer.add_schema({"input_ids": column, "labels": column}, name)
        row = labels[0, 1:] if name == "shifted" else labels[0]
        writer.write_raw_data([{"input_ids": np.arange(1, width + 1, dtype=np.int32), "labels": row}])
        writer.commit()
        data = {"data_loader": {"type": "MindDataset", "dataset_dir": str(path)}}
        model = {"model_config": {"seq_length": 5, "pad_token_id": 0, "pet_config": {"pet_type": "lora"}}}
        run = YamlRun({"use_legacy": False, "train_dataset": data, "model": model})
        ((tokens, counted[name]),) = batches_of(run, 8, 4)
        assert tokens.tolist() == [[1, 2, 3, 4, 5]]
    assert counted["same"].tolist() == counted["shifted"].tolist() == [[False, False, True, True, False]]


def test_settings_that_leave_nothing_to_compute(refused):
    assert "has no pet_config of mindlora" in refused("--model.model_config.pet_config", "null")


def test_a_base_is_needed(refused, tmp_path):
    write_rows(tmp_path / "rows.mindrecord")
    message = refused("--train_dataset_dir", tmp_path / "rows.mindrecord", "--load_checkpoint", "")
    assert message.startswith("load_checkpoint is empty")


def test_an_adapter_that_is_there_stays(tmp_path, capsys):
    from mindlora import cli

    (tmp_path / "kept").mkdir()
    assert cli.main(["eva", LORA_YAML, "--output", str(tmp_path / "kept")]) == 1
    assert "kept exists. Name another --output, or pass --overwrite." in capsys.readouterr().err
    assert cli.main(["eva", LORA_YAML, "--output", str(tmp_path / "new"), "--rows", "0"]) == 1
    assert "--rows is 0" in capsys.readouterr().err
