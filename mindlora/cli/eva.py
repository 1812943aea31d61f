"""mindlora eva: the adapter with which a run begins, from its base and its training data."""

import argparse
import dataclasses
import os
from typing import Any, Dict, Tuple

from mindlora.cli.engine import log_elsewhere, prepare_imports
from mindlora.cli.verb import Verb, add_command
from mindlora.training.launch.imports import import_mindformers

_ROWS, _BATCH = 256, 4


@dataclasses.dataclass(frozen=True)
class EvaReport:
    """The adapter that mindlora eva wrote; str() is YAML to paste into pet_config.

    Attributes:
        output (str): Its folder.
        ranks (dict): Path -> rank of each selected cell.
        batches (int): How many batches were read.
        unsettled (tuple of str): Cells whose directions still changed with the last batch.
        keys (dict): What pet_config must say so that it loads the adapter and its cells have these ranks.
    """

    output: str
    ranks: Dict[str, int]
    batches: int
    unsettled: Tuple[str, ...]
    keys: Dict[str, Any]

    def __str__(self) -> str:
        import yaml

        lines = [
            f"# {sum(self.ranks.values())} ranks for {len(self.ranks)} cells, between {min(self.ranks.values())} and "
            f"{max(self.ranks.values())} each, from {self.batches} batches."
        ]
        if self.unsettled:
            lines.append(
                f"# The directions of {len(self.unsettled)} cells still changed with the last batch: give more --rows."
            )
        lines.append("# Paste this into model.model_config.pet_config.")
        return "\n".join([*lines, yaml.safe_dump(self.keys, sort_keys=False, width=120).rstrip()])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " EVA (Paischer et al., 2024): A holds the strongest directions of what each cell reads, and cells whose "
        "directions explain more get more rank. It runs the base on one device."
    )
    parser.add_argument(
        "yaml",
        metavar="YAML",
        help="MindFormers YAML of the run, with its base, pet_config and data; --a.b.c VALUE and the flags of "
        "mindlora-run override its keys, for instance --train_dataset_dir PATH",
    )
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="where to write the adapter, in PEFT's format"
    )
    parser.add_argument(
        "--rows", type=int, default=_ROWS, metavar="N", help="rows of the data to read at most (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=_BATCH, metavar="N", help="rows that are read at once (default: %(default)s)"
    )
    parser.add_argument(
        "--rho",
        type=float,
        default=2.0,
        metavar="X",
        help="the most ranks of a cell, in multiples of lora_rank; 1 leaves all as they are (default: %(default)s)",
    )
    parser.add_argument(
        "--tau",
        type=float,
        default=0.99,
        metavar="X",
        help="reading ends once each direction has this cosine with that of a batch before (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FOLDER")
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on standard error")
    parser.set_defaults(overrides=[])
    add_command(parser, _eva)


def _eva(arguments: argparse.Namespace) -> EvaReport:
    from mindlora.core.errors import ConfigError
    from mindlora.core.fields import COUNT, check_number
    from mindlora.files.adapters import files

    check_number(arguments.rows, "--rows", COUNT)
    check_number(arguments.batch_size, "--batch-size", COUNT)
    if os.path.exists(arguments.output) and not arguments.overwrite:
        raise ConfigError(f"{arguments.output} exists. Name another --output, or pass --overwrite.")
    files.check_adapter_output(arguments.output, "peft")
    prepare_imports()
    with log_elsewhere(arguments.verbose):
        import_mindformers()
        from mindlora.training.launch.eva import eva_of

        found = eva_of(
            arguments.yaml, arguments.overrides, arguments.rows, arguments.batch_size, arguments.rho, arguments.tau
        )
    files.write(found.adapter, arguments.output)
    keys = {"adapter_path": arguments.output, **found.keys}
    return EvaReport(arguments.output, found.ranks, found.batches, found.unsettled, keys)


VERBS = (Verb("eva", "Make the adapter with which a run begins, from its base and its data (EVA).", _options),)
