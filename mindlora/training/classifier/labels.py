"""Quality of a classifier's labels: accuracy and F1, from a confusion matrix."""

import math
from typing import Dict

import numpy as np


def label_measures(confusion: np.ndarray) -> Dict[str, float]:
    """Returns "accuracy", the share of labels that are right, and "f1", the mean of the labels' F1 (macro).

    A label's F1 is 2 tp / (2 tp + fp + fn), averaged over the labels that occur or are predicted, as in scikit-learn.
    Without a label, both are NaN.

    Args:
        confusion (np.ndarray): [labels, labels]: how often the row's label was predicted as the column's label.
    """
    right, actual, given = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    occurs = (actual + given) > 0
    if not occurs.any():
        return {"accuracy": math.nan, "f1": math.nan}
    f1 = 2 * right[occurs] / (actual + given)[occurs]
    return {"accuracy": float(right.sum() / confusion.sum()), "f1": float(f1.mean())}
