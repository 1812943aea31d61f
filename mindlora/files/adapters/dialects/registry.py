"""Every form of adapter files: one line each, and which of them a file or a folder is in."""

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

# A file is in the first of them that matches.
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
# What users can have written -> its form.
FORMS: Dict[str, Dialect] = {dialect.form: dialect for dialect in DIALECTS if dialect.form}
# The names of the files with an adapter's tensors in a folder.
WEIGHTS: Tuple[str, ...] = tuple(name for dialect in DIALECTS for name in dialect.weights)


def dialect_of(file: File) -> Dialect:
    """Returns the form that a file is in; raises AdapterFormatError if that is none of those that are read, or two."""
    for dialect in DIALECTS:
        if dialect.matches(file):
            return dialect
    foreign.refuse_file_without_adapter(file.keys, file.path)
