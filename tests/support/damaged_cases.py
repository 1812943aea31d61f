"""The corpus of damaged adapters, to which the damaged_*.py files add their cases, and what several of them share."""

from tests.support.adapter_samples import K, Q, folder, header_of, key, make, peft_tensors

CASES = {}  # name -> (function, error, words, whether adapter_file.read itself must refuse it)
QA, QB, KA, KB = key(Q, "A"), key(Q, "B"), key(K, "A"), key(K, "B")
FORMAT, TRUNCATED, SHAPE, MISSING = (
    "AdapterFormatError",
    "TruncatedAdapterError",
    "ShapeMismatchError",
    "MissingTensorsError",
)


def add(name, make_it, error, *words, read=True):
    assert name not in CASES
    CASES[name] = make_it, error, words, read


def sound():
    return header_of(peft_tensors(make()))


def with_weights(content):
    return lambda path: folder(path, weights=content() if callable(content) else content)


def with_tensors(change, **fields):
    def make_it(path):
        tensors = peft_tensors(make())
        change(tensors)
        return folder(path, tensors, **fields)

    return make_it
