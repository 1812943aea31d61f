"""The text of a YAML: read back it is the content, and the comments are where they belong."""

import yaml

from mindlora.core.yaml_file import yaml_text

DATA = {"data_loader": {"type": "MindDataset", "dataset_dir": "it's here.mindrecord"}, "columns": ["a", "b c"]}
CONTENT = {
    "rate": 1e-5,
    "small": 1.5e-7,
    "switch": True,
    "nothing": None,
    "word": "yes",
    "memory": "58GB",
    "empty": "",
    "train": DATA,
    "task": {"type": "Dataset", "dataset_config": DATA},
    "callbacks": [{"type": "Loss"}, {"type": "Save", "save_steps": 5}],
    "parallel": {"strategy": {"only_trainable_params": False}},
}


def test_what_is_written_is_read_again():
    text = yaml_text(["A run", ""], CONTENT, {})
    assert yaml.safe_load(text) == CONTENT
    assert text.startswith("# A run\n#\nrate: ")


def test_a_node_that_is_shared_is_written_once():
    text = yaml_text([], CONTENT, {})
    assert text.count("&") == text.count("*") == 1
    content = yaml.safe_load(text)
    assert content["task"]["dataset_config"] is content["train"]


def test_comments_are_beside_values_and_above_nodes():
    comments = {"rate": "the first", "parallel": "how", "callbacks.Save.save_steps": "often", "task.type": "that"}
    lines = yaml_text([], CONTENT, comments).splitlines()
    assert "rate: 1.0e-05  # the first" in lines
    assert lines[lines.index("parallel:") - 1] == "# how"
    assert "    save_steps: 5  # often" in lines and "  - type: Save" in lines
    assert "  type: Dataset  # that" in lines
