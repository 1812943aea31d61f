"""What is found inside the cells that MindFormers' Trainer puts around a model, in every parallel mode."""

import types

import pytest
from mindformers.wrapper.wrapper import (
    DataOrderWrapperCell,
    GradAccumulationCellWithMultiOutputs,
    GradAccumulationCellWithTwoOutput,
    PipelineCellWithMultiOutputs,
    PipelineCellWithTwoOutput,
)
from mindspore import nn
from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell, _VirtualDatasetCell

from mindlora.training.model.network import base_of, losses_in_sum, train_step_of


class Model(nn.Cell):
    """Stands for a MindFormers model."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace()

    def construct(self, tokens):
        return tokens


class Step(nn.Cell):
    """Stands for mindlora's train step around a network."""

    def __init__(self, network, calculate_per_token_loss=False):
        super().__init__(auto_prefix=False)
        self.network = network
        self.calculate_per_token_loss = calculate_per_token_loss

    def last_record(self):
        """What train_step_of looks for."""


# As MindFormers' wrap_network_with_tool_cells does: from inside out -> how many losses are added up.
WRAPPED = {
    "alone": ([], 1),
    "semi-automatic": ([_VirtualDatasetCell], 1),
    "accumulating": ([lambda model: GradAccumulationCell(model, 4), _VirtualDatasetCell], 4),
    "accumulating, two outputs": ([lambda model: GradAccumulationCellWithTwoOutput(model, 4), _VirtualDatasetCell], 4),
    "accumulating, mcore": ([lambda model: GradAccumulationCellWithMultiOutputs(model, 2), _VirtualDatasetCell], 2),
    "pipeline": ([lambda model: PipelineCellWithTwoOutput(model, 8), _VirtualDatasetCell], 8),
    "pipeline, mcore": ([lambda model: PipelineCellWithMultiOutputs(model, 8), _VirtualDatasetCell], 8),
    "interleaved in a pipeline": (
        [
            lambda model: nn.MicroBatchInterleaved(model, 2),
            lambda model: PipelineCellWithTwoOutput(model, 4),
            _VirtualDatasetCell,
        ],
        8,
    ),
    "named columns": ([lambda model: DataOrderWrapperCell(["input_ids"], model), _VirtualDatasetCell], 1),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_model_and_train_step_are_found_inside_every_tool_cell(name):
    model = network = Model()
    for wrap in WRAPPED[name][0]:
        network = wrap(network)
    step = Step(network)
    assert base_of(step) is model
    assert train_step_of(step) is step


@pytest.mark.parametrize("name", WRAPPED)
def test_the_losses_of_micro_batches_are_counted_unless_tokens_are(name):
    wrappers, count = WRAPPED[name]
    network = Model()
    for wrap in wrappers:
        network = wrap(network)
    assert losses_in_sum(Step(network)) == count
    assert losses_in_sum(Step(network, calculate_per_token_loss=True)) == 1


def test_a_network_without_a_model_is_named():
    with pytest.raises(TypeError, match="Step contains no MindFormers model"):
        base_of(Step(nn.Dense(2, 2)))
