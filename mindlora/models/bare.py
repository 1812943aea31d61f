"""Names of a bare model, as AutoModel and LlamaModel have them: layers.0... where the model with a head has
model.layers.0..."""

import re
from typing import Collection, List

from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE, WORLDS, Architecture

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


def missing_prefix(of_model: Collection[str]) -> str:
    """Returns what the names of cells or parameters lack if they are a bare model's, such as "model."; "" otherwise.

    They are a bare model's if a known model has one of them behind the prefix, and none of them begins with it.
    """
    for architecture in registry.ARCHITECTURES:
        for world in (HF, LEGACY):
            outer, _, layers = architecture.layers.under(world).partition(".")
            prefix = f"{outer}."
            if not layers or any(name.startswith(prefix) for name in of_model):
                continue
            if any(_is_bare(name, prefix, layers, architecture, world) for name in of_model):
                return prefix
    return ""


def with_prefix(name: str, prefix: str) -> str:
    """Returns a name of a bare model as the model with a head has it; a head's, which stands beside it, as it is."""
    is_head = any(map(names.is_output_head, (name, name.rpartition(".")[0])))
    return name if is_head else prefix + name


def _is_bare(name: str, prefix: str, layers: str, architecture: Architecture, world: str) -> bool:
    """Returns whether ``name`` is of a layer or of what stands beside the layers, and is known behind the prefix."""
    whole = prefix + name
    if not re.match(rf"{re.escape(layers)}\.\d+\.", name):
        # mcore's embedding.word_embeddings has nothing before it.
        is_mcores = name in _beside_layers(registry.ARCHITECTURES[0], MCORE)
        return whole in _beside_layers(architecture, world) and not is_mcores
    for other in WORLDS:
        if architecture.rename_path(whole, world, other) or architecture.rename_parameter(whole, world, other):
            return True
    parts = {part for stack in architecture.experts for part in stack.parts}
    return bool(_SINGLE_EXPERT.search(name)) and name.removesuffix(".weight").rpartition(".")[2] in parts


def _beside_layers(architecture: Architecture, world: str) -> List[str]:
    """Returns the names of the embedding, of its table, and of all parameters that may stand beside the layers."""
    parameters = [parameter.under(world) for parameter in architecture.parameters]
    return [architecture.embedding.under(world), architecture.embedding_table(world), *parameters]
