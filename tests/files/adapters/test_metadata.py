"""The metadata that mindlora writes into its files, and files that have lost what it names."""

import json

import pytest

from mindlora.core.errors import AdapterFormatError, MissingTensorsError
from mindlora.files.adapters import files as adapter_files
from tests.support.adapter_samples import K, Q, ckpt_records, make, record, text


def test_a_pair_that_the_metadata_names_and_the_file_lacks(tmp_path):
    metadata = {"alphas": {Q: 3, K: 3}, "whole": []}
    records = [each for each in ckpt_records(make()) if K not in each[0]]
    (tmp_path / "a.ckpt").write_bytes(record(*records, ("mindlora", *text(json.dumps(metadata)))))
    with pytest.raises(MissingTensorsError) as error:
        adapter_files.read(str(tmp_path / "a.ckpt"))
    assert str(error.value) == (
        f"{tmp_path / 'a.ckpt'} lacks tensors that mindlora's metadata in it names: '{K}'. Copy or save the file again."
    )


def test_a_saved_module_that_the_metadata_names_and_the_file_lacks(tmp_path):
    metadata = {"alphas": {Q: 3, K: 3}, "whole": ["lm_head.weight"]}
    (tmp_path / "a.ckpt").write_bytes(record(*ckpt_records(make()), ("mindlora", *text(json.dumps(metadata)))))
    with pytest.raises(MissingTensorsError, match=r"metadata in it names: 'lm_head.weight'\."):
        adapter_files.read(str(tmp_path / "a.ckpt"))


def test_metadata_without_the_lora_alpha_of_a_pair(tmp_path):
    metadata = json.dumps({"alphas": {Q: 3}})
    (tmp_path / "a.ckpt").write_bytes(record(*ckpt_records(make()), ("mindlora", *text(metadata))))
    with pytest.raises(AdapterFormatError) as error:
        adapter_files.read(str(tmp_path / "a.ckpt"))
    assert str(error.value) == (
        f"mindlora's metadata in {tmp_path / 'a.ckpt'} is damaged: it has no lora_alpha for {K}."
    )
