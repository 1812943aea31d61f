"""Preference training: losses of pairs and of judged answers, the reference, and what a train step differentiates."""

from mindlora.config.preference import LOSSES, PreferenceSettings, preference_settings
from mindlora.training.preference.loss import SUMS, PreferenceLoss, answer_tokens, preference_measures
from mindlora.training.preference.precomputed import reference_fingerprint, to_column
from mindlora.training.preference.reference import reference_network

__all__ = [
    "LOSSES",
    "SUMS",
    "PreferenceLoss",
    "PreferenceSettings",
    "answer_tokens",
    "preference_measures",
    "preference_settings",
    "reference_fingerprint",
    "reference_network",
    "to_column",
]
