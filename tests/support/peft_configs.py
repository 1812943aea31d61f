"""Writes an adapter_config.json and reads it."""

import json

from mindlora.files.adapters.dialects import peft_config

PLAIN = {"r": 8, "lora_alpha": 16}


def written(tmp_path, content):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def read(tmp_path, **fields):
    return peft_config.read(written(tmp_path, {**PLAIN, **fields}))
