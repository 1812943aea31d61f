"""MindFormers' HFDataLoader under its PyNative Trainer: rows of JSON, and texts that it packs as the run begins."""

import json

import numpy as np
import pytest

from tests.support import pynative_runs
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.pynative_runs import QWEN3, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, LENGTH = 3, 1024
# The words of the tokenizer.
MODEL = {**QWEN3, "vocab_size": 400, "seq_length": LENGTH, "max_position_embeddings": LENGTH}


def loader(path, **keys):
    node = {"type": "HFDataLoader", "load_func": "load_dataset", "path": "json", "data_files": str(path)}
    return {**node, "split": "train", "shuffle": False, "create_compressed_eod_mask": False, **keys}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with equal rows as a MindRecord and as JSON, and with a tokenizer and texts."""
    folder = tmp_path_factory.mktemp("hugging_face")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=8)
    tokens, labels = pynative_runs.counting_rows(8)
    rows = [{"input_ids": ids[:-1].tolist(), "labels": row[1:].tolist()} for ids, row in zip(tokens, labels)]
    (folder / "rows.json").write_text(json.dumps(rows), "utf-8")
    chat_tokenizer(CHATML).save_pretrained(folder / "model")
    texts = [{"instruction": f"cats {i}", "input": "", "output": f"dogs {i} there"} for i in range(16)]
    (folder / "texts.json").write_text(json.dumps(texts), "utf-8")
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    tokenizer = {"pretrained_model_dir": str(folder / "model"), "trust_remote_code": True, "padding_side": "right"}
    handlers = [
        {"type": "AlpacaInstructDataHandler", "seq_length": LENGTH, "padding": False, "tokenizer": tokenizer},
        {"type": "PackingHandler", "seq_length": LENGTH, "pack_strategy": "pack"},
    ]
    plain = loader(folder / "rows.json")
    packed = loader(folder / "texts.json", handler=handlers, create_attention_mask=True)
    runs = {"record": {}, "json": {"dataloader": plain}, "packed": {"dataloader": packed, "model": MODEL}}
    configs = []
    for name, changes in runs.items():
        callbacks = [
            {"type": "FillWeights"},
            {"type": "HeldOutLoss", "dataset_dir": str(folder / "rows.mindrecord"), "every_steps": 1, "batch_size": 4},
            {"type": "RunReport", "directory": str(folder / name)},
            {"type": "RecordLosses", "directory": str(folder / name)},
        ]
        if name == "packed":
            del callbacks[1]
        config = pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", STEPS, callbacks=callbacks)
        config["train_dataset"]["dataloader"]["shuffle"] = False
        if "dataloader" in changes:
            config["train_dataset"]["dataloader"] = changes["dataloader"]
        config["model"] = changes.get("model", config["model"])
        config["training"].update(local_batch_size=2, global_batch_size=2)
        configs.append(config)
    return dict(zip(runs, pynative_runs.series(configs, folder)))


@shows("hugging_face_data", "qwen3", trainer="pynative")
def test_rows_of_json_train_as_those_of_a_mindrecord(folder, messages):
    assert messages["record"] is messages["json"] is None
    losses, expected = (pynative_runs.losses(folder / name) for name in ("json", "record"))
    assert losses == expected and len(losses) == STEPS


@shows("hugging_face_data", "qwen3", trainer="pynative")
def test_texts_that_it_packs_train(folder, messages):
    assert messages["packed"] is None
    losses = pynative_runs.losses(folder / "packed")
    assert len(losses) == STEPS and np.isfinite(losses).all() and losses[-1] < losses[0]
