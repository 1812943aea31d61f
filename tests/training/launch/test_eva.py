"""mindlora eva refuses a YAML that it cannot use before it builds anything."""

import numpy as np
import pytest
from mindspore.mindrecord import FileWriter

from mindlora.core.errors import LoraError
from tests.support.runs import LORA_YAML, ROOT, SEQUENCE, SIZE_FLAGS, write_rows


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
    assert f"has {SEQUENCE - 2} tokens, and seq_length is {SEQUENCE}. Set --seq_length {SEQUENCE - 2}" in short
    write_packed(tmp_path / "packed.mindrecord")
    assert "are packed, and EVA reads whole rows" in refused("--train_dataset_dir", tmp_path / "packed.mindrecord")


def test_settings_that_leave_nothing_to_compute(refused):
    assert "has no pet_config of mindlora" in refused("--model.model_config.pet_config", "null")
    config = str(ROOT / "configs" / "qwen3" / "lora_qwen3_8b.yaml")
    assert "mcore models run as a graph alone" in refused(config=config)


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
