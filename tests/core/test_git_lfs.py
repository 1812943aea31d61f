"""A pointer of Git LFS in the place of a file is called what it is, wherever a large file is read."""

import pytest

from mindlora.core.errors import CheckpointError, DataError, TokenizerError
from mindlora.data.sources import read_text
from mindlora.data.tokenizers import load_tokenizer
from mindlora.files.base.reader import BaseCheckpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
READERS = {
    "base.ckpt": (BaseCheckpoint, CheckpointError),
    "model.safetensors": (BaseCheckpoint, CheckpointError),
    "rows.jsonl": (read_text, DataError),
    "rows.parquet": (read_text, DataError),
    "tokenizer.json": (load_tokenizer, TokenizerError),
    "tokenizer.model": (load_tokenizer, TokenizerError),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_so(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(POINTER)
    read, error = READERS[name]
    with pytest.raises(
        error, match="is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its repository"
    ):
        read(str(path))
