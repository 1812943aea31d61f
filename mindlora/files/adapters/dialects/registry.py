"""The forms of adapter files, one line each, and the form of a file or folder."""

from typing import Dict, Tuple

from mindlora.files.adapters.dialects import (
    diffusers,
    foreign,
    kohya,
    mcore,
    mindformers,
    mlx,
    peft,
    pynative,
    slora,
    tinker,
)
from mindlora.files.adapters.dialects.dialect import Dialect, File

# A file has the first form that matches.
DIALECTS: Tuple[Dialect, ...] = (
    tinker.Tinker(),
    peft.Peft(),
    mlx.Mlx(),
    kohya.Kohya(),
    diffusers.Diffusers(),
    mindformers.MindPet("mindformers", ".safetensors"),
    mindformers.MindPet("ckpt", ".ckpt"),
    mindformers.MindFormers(mindformers.TK_DELTA),
    mcore.Mcore(),
    pynative.PyNative(),
    slora.Slora(),
)
# Name that users choose -> form.
FORMS: Dict[str, Dialect] = {dialect.form: dialect for dialect in DIALECTS if dialect.form}
# The names of the files with an adapter's tensors in a folder.
WEIGHTS: Tuple[str, ...] = tuple(name for dialect in DIALECTS for name in dialect.weights)


def dialect_of(file: File) -> Dialect:
    """Returns the form of a file; raises AdapterFormatError if no readable form matches, or two do."""
    for dialect in DIALECTS:
        if dialect.matches(file):
            return dialect
    foreign.refuse_file_without_adapter(file.keys, file.path)
