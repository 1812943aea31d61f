"""missing_prefix: which names are a bare model's, and what stands before them in the model with a head."""

import pytest

from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE
from mindlora.models.names import missing_prefix, with_prefix

ARCHITECTURES = [(architecture, world) for architecture in registry.ARCHITECTURES for world in (HF, LEGACY)]


def names_of(architecture, world):
    """Returns the names of a model's parameters and of its cells in a world."""
    layer = f"{architecture.layers.under(world)}.3."
    beside = [architecture.embedding_table(world), architecture.head_weight(world)]
    for parameter in architecture.parameters:
        name = parameter.under(world)
        beside.append(name if name.startswith(layer.partition(".")[0]) else layer + name)
    return [*beside, *(layer + cell.under(world) for cell in architecture.cells if cell.under(world))]


@pytest.mark.parametrize(("architecture", "world"), ARCHITECTURES, ids=lambda value: getattr(value, "title", value))
def test_the_names_of_every_model_lack_what_automodel_leaves_out(architecture, world):
    prefix = f"{architecture.layers.under(world).partition('.')[0]}."
    names = names_of(architecture, world)
    assert missing_prefix(names) == ""
    bare = [name.removeprefix(prefix) for name in names]
    assert missing_prefix(bare) == prefix
    assert [with_prefix(name, prefix) for name in bare if not name.startswith("output_layer")] == [
        name for name in names if not name.startswith("transformer.output_layer")
    ]


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES, ids=lambda architecture: architecture.title)
def test_mcore_s_names_lack_nothing(architecture):
    layer = f"{architecture.layers.mcore}.3."
    names = [architecture.embedding_table(MCORE), architecture.head_weight(MCORE)]
    names += [layer + cell.mcore for cell in architecture.cells if cell.mcore]
    assert missing_prefix(names) == "" and missing_prefix(names[:1]) == ""


@pytest.mark.parametrize(
    "name", ["layers.0.dense", "blocks.0.self_attn.q_proj", "encoder.layers.0.mlp.fc1", "q_proj", "lm_head", "norm", ""]
)
def test_any_other_name_is_no_bare_model_s(name):
    assert missing_prefix([name]) == ""
