"""Shared by the tests of the plug-in."""
import pytest

from tests.plugin.instruction_rows import CHINESE, ENGLISH


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A folder with a small tokenizer of Hugging Face's, trained on the two rows."""
    from mindlora.plugin import instructions, tokenizers
    path = tmp_path_factory.mktemp("tokenizer") / "bpe"
    texts = [record[field] for record in (CHINESE, ENGLISH) for field in instructions.FIELDS] * 2
    tokenizers.train_tokenizer(texts, 300, str(path))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    """The tokenizer itself."""
    from mindlora.plugin import tokenizers
    return tokenizers.load_tokenizer(tokenizer_path)
