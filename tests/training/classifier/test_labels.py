"""Accuracy and F1 from counts of labels given, with figures worked out by hand."""

import numpy as np
import pytest

from mindlora.training.classifier.labels import label_measures


def test_accuracy_and_the_mean_of_f1():
    confusion = np.array([[3, 1, 0, 0], [2, 4, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    found = label_measures(confusion)
    assert found["accuracy"] == pytest.approx(7 / 11)
    # Nothing is known about the fourth label, and it does not count.
    assert found["f1"] == pytest.approx((6 / 9 + 8 / 12 + 0) / 3)


def test_no_labels_at_all():
    # Neither is the best of a run.
    assert all(map(np.isnan, label_measures(np.zeros((2, 2))).values()))
