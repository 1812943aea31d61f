"""LoRAEmbedding against numpy: equation, gradients, initial values, files and merging."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import Adapter, LoraConfig, apply_lora, convert_adapter, freeze_base, load_lora, save_lora
from mindlora.core.errors import AdapterError, MergeError, TargetError, UnsupportedCellError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.dialects import peft
from mindlora.files.base.merge import merge_checkpoint
from mindlora.network.cells.embedding import LoRAEmbedding
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from tests.support.networks import WeightedSum, as_array, assert_close, randomize, snapshot

ROWS, DIM, RANK, ALPHA = 11, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
IDS = np.array([[1, 2, 10, 2], [2, 0, 1, 7]], np.int32)


@pytest.fixture(params=["Embedding", "LlamaEmbedding"])
def table(request, mindformers):
    """An embedding with normal rows."""
    if request.param == "Embedding":
        cell = nn.Embedding(ROWS, DIM)
    else:
        cell = mindformers.models.llama.llama_layer.LlamaEmbedding(ROWS, DIM)
    randomize(cell.get_parameters(), seed=1)
    return cell


def adapted(cell, config=CONFIG):
    lora = LoRAEmbedding.from_cell(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def changed(lora):
    """The oracle: W + scale (B A)^T."""
    a, b = map(as_array, lora.lora_parameters())
    return as_array(lora.weight) + lora.scale * (b @ a).T


def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, table):
    lora = LoRAEmbedding.from_cell(table, CONFIG)
    np.testing.assert_array_equal(lora(Tensor(IDS)).asnumpy(), table(Tensor(IDS)).asnumpy())
    a, b = map(as_array, lora.lora_parameters())
    assert a.shape == (RANK, ROWS) and not a.any() and b.shape == (DIM, RANK) and 0.3 < b.std() < 2  # as in PEFT
    randomize(lora.lora_parameters(), seed=2)
    for ids in (IDS, IDS[0]):
        assert_close(lora(Tensor(ids)), changed(lora)[ids])


def test_gradients(mode, table):
    lora = adapted(table)
    weights = np.random.default_rng(3).normal(size=(*IDS.shape, DIM)).astype(np.float32)
    of_a, of_b = ms.grad(WeightedSum(lora), None, lora.lora_parameters())(Tensor(IDS), Tensor(weights))
    slope = np.zeros((ROWS, DIM))
    np.add.at(slope, IDS.reshape(-1), weights.reshape(-1, DIM))
    a, b = map(as_array, lora.lora_parameters())
    assert_close(of_a, SCALE * (slope @ b).T)
    assert_close(of_b, SCALE * (a @ slope).T)


@pytest.mark.parametrize("dtype, compute_dtype", [("float16", None), ("float16", "float32"), ("float32", "float16")])
def test_dtypes(mode, dtype, compute_dtype):
    cell = nn.Embedding(ROWS, DIM)
    cell.embedding_table = ms.Parameter(Tensor(np.random.default_rng(1).normal(size=(ROWS, DIM)), getattr(ms, dtype)))
    lora = adapted(cell, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, compute_dtype=compute_dtype))
    y = lora(Tensor(IDS))
    assert y.dtype == getattr(ms, dtype)
    assert_close(y, changed(lora)[IDS], "float16")


@pytest.mark.parametrize(
    "keys",
    [{"lora_b_init": "zeros"}, {"lora_a_init": "normal"}, {"lora_a_init": "kaiming_uniform", "lora_b_init": "zeros"}],
)
def test_initializers_that_are_given(keys):
    a, b = map(as_array, LoRAEmbedding.from_cell(nn.Embedding(ROWS, DIM), LoraConfig(**keys)).lora_parameters())
    assert a.any() and not b.any()


def test_rows_without_a_batch(mindformers):
    cell = mindformers.models.llama.llama_layer.LlamaEmbedding(ROWS, DIM, rmsnorm_compute_2d=True)
    lora = adapted(cell)
    assert_close(lora(Tensor(IDS)), changed(lora)[IDS.reshape(-1)])


class Speaker(nn.Cell):
    """An embedding and an output head, as in a language model."""

    def __init__(self, tied=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(ROWS, DIM)
        self.lm_head = nn.Dense(DIM, ROWS, has_bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.embedding_table

    def construct(self, ids):
        return self.lm_head(self.tok_embeddings(ids))


def speaker(targets=("tok_embeddings",), seed=2, **keys):
    network = Speaker(**keys)
    randomize(network.get_parameters(), seed=1)
    if targets:
        apply_lora(network, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules=list(targets)))
        randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed)
    return network


def test_in_a_network():
    network = speaker(["embed_tokens", "lm_head"])  # Hugging Face's name
    freeze_base(network)
    assert {p.name for p in network.trainable_params()} == {
        f"{path}.mindpet_delta_lora_{part}" for path in ("tok_embeddings", "lm_head") for part in "ab"
    }
    assert network.tok_embeddings.embedding_table is network.tok_embeddings.weight
    assert network.tok_embeddings.weight.name == "tok_embeddings.embedding_table"
    with pytest.raises(TargetError, match="that is a Embedding and not a linear cell"):
        apply_lora(Speaker(), LoraConfig(target_modules="all-linear", exclude_modules=["tok_embeddings"]))


@pytest.mark.parametrize("form, name", [("peft", "a"), ("ckpt", "a.ckpt"), ("mindformers", "a.safetensors")])
def test_saved_loaded_and_converted(form, name, tmp_path):
    source = speaker(["tok_embeddings", "lm_head"])
    save_lora(source, str(tmp_path / name), form)
    for target in (speaker(()), speaker(["tok_embeddings", "lm_head"], seed=5)):
        load_lora(target, str(tmp_path / name))
        np.testing.assert_array_equal(target(Tensor(IDS)).asnumpy(), source(Tensor(IDS)).asnumpy())
        assert type(target.tok_embeddings) is LoRAEmbedding
    convert_adapter(str(tmp_path / name), str(tmp_path / "again"), "peft")
    adapter = adapter_files.read(str(tmp_path / "again"))
    # A bare model's names are read as those of a whole network.
    path = "model.tok_embeddings"
    assert adapter.embeddings == {path}
    np.testing.assert_allclose(
        adapter.delta(path), changed(source.tok_embeddings) - as_array(source.tok_embeddings.weight), atol=1e-5
    )
    key = peft.tensor_key("tok_embeddings", "A", True)
    assert key == "base_model.model.embed_tokens.lora_embedding_A" and peft.Peft().is_embedding(key, "")
    with pytest.raises(AdapterError, match="^slora does not serve adapters of embeddings: model.tok_emb"):
        convert_adapter(str(tmp_path / name), str(tmp_path / "slora"), "slora")


def test_merged_and_unmerged(mode):
    network = speaker()
    cell, before, y = network.tok_embeddings, snapshot(network), network(Tensor(IDS)).asnumpy()
    expected = changed(cell)
    report = merge_lora(network)
    assert_close(cell.weight, expected)
    assert 0 < report.difference <= report.bound
    assert_close(network(Tensor(IDS)), y)
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network)
    assert type(network.tok_embeddings) is nn.Embedding
    assert_close(network.tok_embeddings.embedding_table, expected)
    assert_close(network(Tensor(IDS)), y)


def test_a_tied_table_is_not_merged():
    with pytest.raises(MergeError, match="shares its weight with"):
        merge_lora(speaker(tied=True))


@pytest.mark.parametrize("world", ["mindformers", "hf"])
def test_a_checkpoint_is_merged(world, tmp_path):
    from safetensors.numpy import load_file, save_file

    own = {"mindformers": "model.tok_embeddings.embedding_weight", "hf": "model.embed_tokens.weight"}
    network = speaker()
    base = {own[world]: network.tok_embeddings.weight.asnumpy(), "lm_head.weight": network.lm_head.weight.asnumpy()}
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(base, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    adapter = adapter_of_model(network)
    adapter_files.write(adapter, str(tmp_path / "a"))
    merge_checkpoint(str(folder), str(tmp_path / "a"), str(tmp_path / "m"))
    merged = load_file(tmp_path / "m" / "model.safetensors")
    assert_close(merged[own[world]], changed(network.tok_embeddings))
    np.testing.assert_array_equal(merged["lm_head.weight"], base["lm_head.weight"])
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    # A tied base is untied: its head becomes the table that it shared, without the adapter.
    merge_checkpoint(str(folder), str(tmp_path / "a"), str(tmp_path / "n"))
    merged = load_file(tmp_path / "n" / "model.safetensors")
    assert_close(merged[own[world]], changed(network.tok_embeddings))
    np.testing.assert_array_equal(merged["lm_head.weight"], base[own[world]])


def adapter_of_model(network):
    """The adapter of a speaker whose embedding has a Llama's path."""
    parts = network.tok_embeddings.parts()
    return Adapter(
        {("model.tok_embeddings", part): parameter.asnumpy() for part, parameter in parts.items()},
        {"model.tok_embeddings": ALPHA},
        embeddings={"model.tok_embeddings"},
    )


class Own(nn.Embedding):
    """A forward of its own."""

    def construct(self, ids):
        return super().construct(ids) * 2


def sharded():
    cell = nn.Embedding(ROWS, DIM)
    cell.gather.in_strategy = ((1, 1), (2, 1))
    return cell


@pytest.mark.parametrize(
    "make, keys, message",
    [
        (
            lambda: nn.Embedding(ROWS, DIM),
            {"use_dora": True},
            "0: use_dora is not supported on embeddings: its norms are those of the rows of a linear cell. "
            "Leave use_dora out, or add the cell to exclude_modules.",
        ),
        (
            lambda: nn.Embedding(ROWS, DIM),
            {"freeze_lora_a": True},
            "0: freeze_lora_a is not supported on embeddings: A is zero at first there, and B would get no gradient. "
            "Leave freeze_lora_a out, or add the cell to exclude_modules.",
        ),
        (
            lambda: nn.Embedding(ROWS, DIM, use_one_hot=True),
            {},
            "0: Embedding multiplies one-hot vectors, which LoRAEmbedding does not. Set use_one_hot: False.",
        ),
        (
            lambda: Own(ROWS, DIM),
            {},
            "0: Own has a forward of its own, which LoRAEmbedding would drop. Add it to exclude_modules.",
        ),
        (
            sharded,
            {},
            "0: The embedding is sharded, but LoRA on sharded embeddings is not supported. Add it to exclude_modules.",
        ),
    ],
)
def test_embeddings_that_cannot_carry_lora(make, keys, message):
    network = nn.SequentialCell(make())
    with pytest.raises(UnsupportedCellError) as error:
        apply_lora(network, LoraConfig(target_modules=["0"], **keys))
    assert str(error.value) == f"LoRA cannot be put on 1 of the selected cells. {message}"


def test_mindformers_form_names_its_embedding(tmp_path):
    """A checkpoint that MindFormers' own callback wrote has no record of ours."""
    network = Speaker()
    randomize(network.get_parameters())
    apply_lora(network, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules=["tok_embeddings", "lm_head"]))
    ms.save_checkpoint(network, str(tmp_path / "plain.ckpt"))
    assert adapter_files.read(str(tmp_path / "plain.ckpt")).embeddings == {"model.tok_embeddings"}
