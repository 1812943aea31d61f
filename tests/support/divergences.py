"""The generalized Jensen-Shannon divergence in NumPy, float64: what HeadDivergences and TRL are compared with."""

import numpy as np


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergences(student_logits, teacher_logits, beta):
    """Returns the divergence of each row, and its gradient with respect to the student's logits."""
    student, teacher = (log_softmax(np.asarray(logits, np.float64)) for logits in (student_logits, teacher_logits))
    p, t = np.exp(student), np.exp(teacher)
    if beta == 0:
        return (t * (teacher - student)).sum(-1), p - t
    if beta == 1:
        found = (p * (student - teacher)).sum(-1)
        return found, p * (student - teacher - found[..., None])
    mixture = np.log(beta * t + (1 - beta) * p)
    from_student = (p * (student - mixture)).sum(-1)
    found = beta * (t * (teacher - mixture)).sum(-1) + (1 - beta) * from_student
    return found, (1 - beta) * p * (student - mixture - from_student[..., None])
