"""Fine-tunes on real Chinese dialogues, where MINDLORA_TEST_DATA names the folder that holds them."""

import json
import os

import pytest

from mindlora.training.report.history import read_history
from tests.support.runs import LORA_YAML, python, succeeded

DIALOGUES = os.path.join(os.environ.get("MINDLORA_TEST_DATA", ""), "huanhuan.json")
ROWS, VOCABULARY, SEQUENCE = 320, 1500, 96


@pytest.mark.skipif(not os.path.isfile(DIALOGUES), reason="MINDLORA_TEST_DATA names no folder with huanhuan.json")
def test_the_loss_on_held_out_dialogues_falls(tmp_path):
    with open(DIALOGUES, encoding="utf-8") as file:
        rows = json.load(file)[:ROWS]
    (tmp_path / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    converted = _run(
        tmp_path,
        "mindlora.cli",
        "data",
        "alpaca",
        "--input",
        "rows.json",
        "--output",
        "data.mindrecord",
        "--tokenizer",
        "tokenizer",
        "--train-tokenizer",
        VOCABULARY,
        "--seq-length",
        SEQUENCE,
        "--template",
        "plain",
        "--holdout",
        0.1,
        "--json",
    )
    report = json.loads(converted)
    # The few rows that exceed the tiny model's window are left out and counted.
    assert report["rows"] + report["held_out_rows"] + sum(map(len, report["skipped"].values())) == ROWS
    assert report["rows"] > 0.8 * ROWS

    _run(
        tmp_path,
        "mindlora.training.launch.launcher",
        "--config",
        LORA_YAML,
        "--output_dir",
        "run",
        "--train_dataset_dir",
        "data.mindrecord",
        "--epochs",
        2,
        "--batch_size",
        8,
        "--model.model_config.seq_length",
        SEQUENCE,
        "--model.model_config.vocab_size",
        VOCABULARY,
        "--model.model_config.num_layers",
        1,
        # With the head, because a random base can learn frequent tokens in no other way.
        "--model.model_config.pet_config.target_modules",
        json.dumps(["wq", "wv", "w2", "lm_head"]),
        "--callbacks",
        json.dumps(
            [
                {"type": "HeldOutLoss", "dataset_dir": "data-heldout.mindrecord", "every_steps": 10},
                {"type": "LoraCheckpoint", "save_steps": 10, "best_metric": "held_out_loss"},
            ]
        ),
    )
    history = read_history(str(tmp_path / "run"))
    untrained, held_out = history.series("loss")[1][0], history.series("held_out_loss")[1]
    # The base is random, so an adapter can only learn which tokens are frequent; ln(1500) is 7.3.
    assert 7.0 < untrained < 7.6 and held_out[-1] < held_out[0] - 0.2 and held_out[-1] < untrained - 0.9
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(
        os.listdir(tmp_path / "run" / "lora_checkpoint" / "best")
    )


def _run(folder, module, *words):
    return succeeded(python(["-m", module, *words], folder))
