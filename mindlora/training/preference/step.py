"""Preference training on MindFormers' models: log-probabilities of labels instead of a loss, and the reference."""

from mindspore import nn

from mindlora.network.repeated_layers import mark_reference
from mindlora.training.model.log_probabilities import RowLogProbabilities, row_log_probabilities
from mindlora.training.model.loss_in_pieces import set_differentiates
from mindlora.training.preference.loss import PreferenceLoss
from mindlora.training.preference.reference import reference_network
from mindlora.training.preference.settings import PreferenceSettings


def reference_of(policy: RowLogProbabilities) -> RowLogProbabilities:
    """Returns a cell for the initial model's log-probabilities, without a second copy of the base."""
    reference = reference_network(policy.network)
    mark_reference(reference)
    set_differentiates(reference, False)
    return RowLogProbabilities(reference, policy.of_labels)


def preference_loss(network: nn.Cell, settings: PreferenceSettings) -> PreferenceLoss:
    """Returns a MindFormers model's loss on preferences. The model's own loss is replaced in place.

    Raises ConfigError if the model's loss does not get the logits of all tokens, or the reference is missing.
    """
    policy = row_log_probabilities(network, "preference", settings.kind.scores)
    reference = None
    if settings.kind.uses_reference and not settings.precomputed_reference:
        reference = reference_of(policy)
    return PreferenceLoss(policy, reference, settings)
