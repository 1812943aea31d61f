"""Exchanges of gradients: the ranks, the flat vector that they sum, and all kinds from dense to two-level."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.communication import create_group, get_group_size, get_rank
from safetensors import safe_open
from safetensors.numpy import save_file

from mindlora.core import atomic
from mindlora.core.errors import ConfigError, LoraError
from mindlora.models.names import TRANSIENT
from mindlora.training.exchange.settings import ExchangeSettings
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of
from mindlora.training.resume.collectives import wait_for_all_ranks

# Bytes per number.
FLOAT32 = 4
FLOAT16 = 2
# On CPUs, the receiver of a message returns all of it as a receipt, so a network device counts twice as many bytes.
CPU_RECEIPTS = 2


@dataclass(frozen=True)
class Ranks:
    """A communication group as seen by one of its ranks; ``group`` is its name, or None for all ranks."""

    rank: int
    count: int
    group: Optional[str] = None

    def all_reduce(self) -> ops.AllReduce:
        """Returns an operator that sums a tensor over the group."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group) if self.group else ops.AllReduce()

    def bytes_to_sum(self, elements: int, element_bytes: int = FLOAT32) -> int:
        """Returns the bytes of payload that a rank sends in an AllReduce: 2 (n - 1) / n times the vector's bytes.

        MindSpore's AllReduce on CPUs is a ring, in which each of n ranks sends 2 (n - 1) chunks of 1/n of the vector.
        """
        return round(2 * (self.count - 1) * elements * element_bytes / self.count)


class _Gather(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.all_gather = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_gather(x)


def digest(parameters: Sequence[Parameter]) -> np.ndarray:
    """Returns the SHA-256 of the parameters' names and values: int32 [8]."""
    sha256 = hashlib.sha256()
    for parameter in parameters:
        sha256.update(parameter.name.encode())
        sha256.update(parameter.asnumpy().tobytes())
    return np.frombuffer(sha256.digest(), np.int32)


def check_agreement(parameters: Sequence[Parameter], step: int) -> None:
    """Compares parameters, in the same order on all ranks; every rank must call this after a step.

    Raises LoraError on every rank if the parameters differ; it names the ranks that differ from rank 0.
    """
    gathered = _Gather()(Tensor(digest(parameters), mstype.int32)).asnumpy().reshape(-1, 8)
    differing = [rank for rank in range(len(gathered)) if (gathered[rank] != gathered[0]).any()]
    if differing:
        raise LoraError(
            f"After step {step}, the trained parameters of rank {', '.join(map(str, differing))} differ from those of "
            "rank 0, so the ranks no longer train one adapter. Resume from an earlier step; if it happens again, look "
            "for differences between the machines (versions, hardware errors)."
        )


# float32 holds every whole number below 2 ** 24 exactly; a sum of such numbers that stays below it is exact too.
WORD_BITS = 24
# Each rank has its own residual, so it is not part of the state that rank 0 saves.
RESIDUAL_NAME = f"{TRANSIENT}gradient_exchange_residual"
# A sum of at most 2 ** 15 leaves room for each addend's rounding below float16's largest number, 65504.
_LARGEST_EXPONENT = 14
_FOLDER = "unsent_gradients"
_TENSOR = "unsent"


class FlatLayout:
    """The layout of the flat vector: the gradients of ``parameters``, one after another, in order.

    ``flatten`` turns a tuple of gradients into the vector, float32 [size]; ``unflatten`` turns the vector into float32
    gradients in the shapes of the parameters. ``offsets`` says where each gradient begins.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.names = [parameter.name for parameter in parameters]
        self.sizes = [parameter.size for parameter in parameters]
        self.offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.size = sum(self.sizes)
        self.flatten = _Flatten()
        self.unflatten = _Unflatten(self, [tuple(parameter.shape) for parameter in parameters])


class _Flatten(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, gradients: Tuple[Tensor, ...]) -> Tensor:
        parts = ()
        for gradient in gradients:
            parts += (gradient.astype(mstype.float32).reshape(-1),)
        return ops.cat(parts)


class _Unflatten(nn.Cell):
    def __init__(self, layout, shapes):
        super().__init__(auto_prefix=False)
        self.places = tuple(zip(layout.offsets, layout.sizes, shapes))

    def construct(self, flat: Tensor) -> Tuple[Tensor, ...]:
        gradients = ()
        for start, size, shape in self.places:
            gradients += (flat[start : start + size].reshape(shape),)
        return gradients


class Exchange(nn.Cell):
    """Sums a flat vector over the ranks of a group.

    The train step calls ``reduce`` inside its graph, and ``keep`` only if the step is done and not skipped.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.nothing = Tensor([0.0], mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        """Sums the gradients, float32 [size], over the ranks, with the same bits on each; changes no state.

        Returns the sum, and the part of this rank's gradients that it has not sent, for keep.
        """
        raise NotImplementedError

    def keep(self, residual: Tensor) -> Tensor:
        """Keeps the residual for later steps, and returns it."""
        return residual

    @property
    def bytes_per_step(self) -> int:
        """Number of bytes that this rank sends in a step."""
        raise NotImplementedError

    @property
    def bytes_between_machines(self) -> int:
        """Number of a step's bytes that leave this rank's machine."""
        return self.bytes_per_step

    def unsent(self) -> Optional[Parameter]:
        """The parameter of this rank's unsent gradients, float32; None if the exchange sends everything."""
        return None


class DenseExchange(Exchange):
    """Sums the vector of ``size`` elements in one AllReduce, instead of one AllReduce per parameter."""

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.all_reduce = ranks.all_reduce()

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        return self.all_reduce(flat), self.nothing

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.size)


class Float16Exchange(Exchange):
    """Sums the vector of ``size`` elements in float16: sum = AllReduce(float16(s flat)) / s.

    s is a power of two, the same on all ranks, such that s m is in [2 ** 14, 2 ** 15). m is the sum over the ranks of
    their largest absolute values, from a first AllReduce of one number. No partial sum of any element exceeds m, so
    neither the cast nor the sum can overflow, and small gradients do not vanish. If the gradient of a rank is not
    finite, the sum is not finite on any rank.
    """

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.all_reduce = ranks.all_reduce()
        self.all_reduce_largest = ranks.all_reduce()
        self.smallest = Tensor(2.0**-100, mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        largest = self.all_reduce_largest(ops.abs(flat).max().reshape(1))
        exponent = ops.floor(ops.log2(ops.maximum(largest, self.smallest)))
        scale = ops.pow(2.0, _LARGEST_EXPONENT - exponent)
        return self.all_reduce((flat * scale).astype(mstype.float16)).astype(mstype.float32) / scale, self.nothing

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.size, FLOAT16) + self.ranks.bytes_to_sum(1)


# Exchange of gradients as integers of few bits, several in one float32, with error feedback.

# Elements that share a scale; a multiple of the numbers per word for 4, 6 and 8 bits.
BLOCK = 240


def levels(bits: int, ranks: int) -> float:
    """Returns L: a sum over the ranks takes integers up to L + ranks / 2, the largest that ``bits`` bits can hold."""
    return 2 ** (bits - 1) - 1 - ranks / 2


class QuantizedExchange(Exchange):
    """Sums the vector as integers of ``bits`` bits: 4, 6 or 8.

    With c = gradient + residual, in blocks of 240 elements, S = sum over the ranks of max |c| (a first AllReduce of
    one number for each block), and u = S / L, where L must be at least 1:

        q = round(c / u) on each rank,  sum = u AllReduce(q),  residual = c - u q

    |q| is at most max |c| / u + 1/2 on each rank, so the sum of q is at most L + ranks / 2 = 2 ** (bits - 1) - 1, and
    24 / bits such sums fit into one float32, which adds them up without losing a bit. All elements arrive in every
    step, so that an optimizer such as Adam sees no gaps. The residual keeps the rounding error (error feedback; Seide
    et al., 1-Bit Stochastic Gradient Descent, 2014); only comparisons switch it off. If the gradient of a rank is not
    finite, the sum is not finite on any rank.
    """

    def __init__(self, size: int, ranks: Ranks, bits: int = 6, feedback: bool = True):
        super().__init__()
        self.size = size
        self.ranks = ranks
        self.feedback = feedback
        self.blocks = -(-size // BLOCK)
        self.padding = Tensor(np.zeros(self.blocks * BLOCK - size), mstype.float32)
        self.is_padded = self.blocks * BLOCK > size
        self.in_word = WORD_BITS // bits
        self.words = self.blocks * BLOCK // self.in_word
        self.levels = levels(bits, ranks.count)
        self.sum_largest = ranks.all_reduce()
        self.sum_words = ranks.all_reduce()
        self.base = float(2**bits)
        powers = self.base ** np.arange(self.in_word)
        self.powers = Tensor(powers, mstype.float32)
        # Makes all digits of a sum positive, so that they can be separated.
        self.digit_offset = self.base / 2
        self.word_offset = float(self.digit_offset * powers.sum())
        self.residual = Parameter(Tensor(np.full(size, -0.0, np.float32)), name=RESIDUAL_NAME, requires_grad=False)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        corrected = flat + self.residual
        blocks = (ops.cat((corrected, self.padding)) if self.is_padded else corrected).reshape(self.blocks, BLOCK)
        largest = self.sum_largest(ops.amax(ops.abs(blocks), -1))
        unit = (ops.select(largest == 0, ops.ones_like(largest), largest) / self.levels).expand_dims(-1)
        whole = ops.round(blocks / unit)
        sums = self.digits(self.sum_words((whole.reshape(self.words, self.in_word) * self.powers).sum(-1)))
        total = sums.reshape(self.blocks, BLOCK) * unit
        return total.reshape(-1)[: self.size], (blocks - whole * unit).reshape(-1)[: self.size]

    def digits(self, words: Tensor) -> Tensor:
        """Returns the integers in words: float32 [words] -> [words, 24 / bits]."""
        shifted = (words + self.word_offset).expand_dims(-1) / self.powers
        return ops.floor(shifted) - self.base * ops.floor(shifted / self.base) - self.digit_offset

    def keep(self, residual: Tensor) -> Tensor:
        if not self.feedback:
            return residual
        return ops.assign(self.residual, residual)

    @property
    def bytes_per_step(self) -> int:
        return self.ranks.bytes_to_sum(self.blocks) + self.ranks.bytes_to_sum(self.words)

    def unsent(self) -> Parameter:
        return self.residual


def fits(bits: int, ranks: int) -> bool:
    """Returns whether ``bits`` bits can hold the sum over ``ranks`` ranks."""
    return levels(bits, ranks) >= 1


# Exchange over machines: dense within each machine, where links are fast, and any other exchange between machines.


class TwoLevelExchange(Exchange):
    """Sums over the ranks of a machine, then over the machines.

    The vector has as many parts as a machine has ranks. Each rank sums one part with the ranks of the same number on
    the other machines; then the machine's ranks join the parts. ``between`` exchanges this rank's part, of
    part_size(size, within) elements.
    """

    def __init__(self, size: int, within: Ranks, between: Exchange):
        super().__init__()
        self.size = size
        self.within = within
        self.between = between
        self.part = part_size(size, within)
        self.start = within.rank * self.part
        self.padded = self.part * within.count
        self.sum_machine = within.all_reduce()
        self.put_together = within.all_reduce()

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        machine = self.sum_machine(flat)
        padded = ops.pad(machine, (0, self.padded - self.size))
        total, residual = self.between.reduce(padded[self.start : self.start + self.part])
        parts = self.put_together(ops.pad(total, (self.start, self.padded - self.start - self.part)))
        return parts[: self.size], residual

    def keep(self, residual: Tensor) -> Tensor:
        return self.between.keep(residual)

    @property
    def bytes_per_step(self) -> int:
        inside = self.within.bytes_to_sum(self.size) + self.within.bytes_to_sum(self.padded)
        return inside + self.between.bytes_per_step

    @property
    def bytes_between_machines(self) -> int:
        return self.between.bytes_per_step

    def unsent(self) -> Optional[Parameter]:
        return self.between.unsent()


def part_size(size: int, within: Ranks) -> int:
    """Returns the number of elements that each rank of a machine exchanges with other machines."""
    return -(-size // within.count)


def machine_groups(
    ranks: Ranks, local_size: int, make_group: Optional[Callable[[str, List[int]], None]] = None
) -> Tuple[Ranks, Ranks]:
    """Returns the groups of this rank's machine and of the ranks with the same number on every machine.

    The ranks of a machine are consecutive. ``make_group`` gets (name, ranks) of both groups; None means MindSpore's
    create_group.
    """
    machine, number = divmod(ranks.rank, local_size)
    machines = ranks.count // local_size
    names = f"exchange_machine_{machine}", f"exchange_number_{number}"
    members = (
        [machine * local_size + i for i in range(local_size)],
        [number + i * local_size for i in range(machines)],
    )
    for name, group in zip(names, members):
        (make_group or create_group)(name, group)
    return Ranks(number, local_size, names[0]), Ranks(machine, machines, names[1])


# The exchange that a YAML's gradient_exchange selects.


def make_exchange(settings: ExchangeSettings, layout: FlatLayout, ranks: Ranks, on_this_machine: int) -> Exchange:
    """Returns one rank's exchange; every rank must call this function, since it may make groups.

    ``ranks`` are all of them. Raises ConfigError if local_size does not divide them into machines.
    """
    local_size = settings.local_size or (on_this_machine if on_this_machine < ranks.count else 1)
    if ranks.count % local_size or local_size == ranks.count:
        raise ConfigError(
            f"gradient_exchange: local_size is {local_size}, and {ranks.count} ranks do not make two or more machines "
            "of that size. Set it to the number of ranks on each machine, or to 1."
        )
    if local_size == 1:
        return _one_level(settings, layout.size, ranks)
    within, between = machine_groups(ranks, local_size)
    part = part_size(layout.size, within)
    return TwoLevelExchange(layout.size, within, _one_level(settings, part, between))


def _one_level(settings, size, ranks):
    if settings.type == "quantized":
        if not fits(settings.bits, ranks.count):
            raise ConfigError(
                f"gradient_exchange: {ranks.count} ranks cannot add up numbers of {settings.bits} bits. Set bits to 6 "
                "or 8, or local_size to the ranks of a machine, so that fewer exchange with each other."
            )
        return QuantizedExchange(size, ranks, settings.bits)
    return {"dense": DenseExchange, "float16": Float16Exchange}[settings.type](size, ranks)


def save_unsent(directory: str, step: int, train_network: nn.Cell, keep_last: int) -> None:
    """Writes this rank's unsent gradients, and returns once all ranks have written theirs.

    Only then does rank 0 write its step folder, so that each step folder has these files, wherever a run is killed. An
    exchange that sends everything writes no file. The file is unsent_gradients/step_N.rank_R.safetensors in
    ``directory``; one more file is kept than step folders.
    """
    exchange = _compressing(train_network)
    if exchange is None:
        return
    folder = os.path.join(directory, _FOLDER)
    with atomic.replace_file(_path(folder, step)) as path:
        # A copy is contiguous.
        save_file({_TENSOR: exchange.unsent().asnumpy().copy()}, path, {"exchange": json.dumps(_identity(exchange))})
    saved = _files_of_this_rank(folder)
    # Files of later steps belong to an earlier run, whose folders have been moved.
    for old in [s for s in saved if s > step] + [s for s in saved if s <= step][: -keep_last - 1]:
        os.unlink(saved[old])
    wait_for_all_ranks()


def restore_unsent(step_folder: str, step: int, train_network: nn.Cell) -> None:
    """Restores this rank's unsent gradients; without a file of this run, they start at 0, with a warning."""
    exchange = _compressing(train_network)
    if exchange is None:
        return
    path = _path(os.path.join(os.path.dirname(os.path.abspath(step_folder)), _FOLDER), step)
    problem = f"{path} does not exist"
    if os.path.isfile(path):
        with safe_open(path, framework="np") as file:
            saved = json.loads(file.metadata()["exchange"])
            expected = _identity(exchange)
            if saved == expected:
                exchange.unsent().set_data(Tensor(file.get_tensor(_TENSOR)))
                return
        problem = f"{path} was written by {_text(saved)}, but this run has {_text(expected)}"
    logger.warning(
        "Gradients that were not sent start at zero on rank %d: %s. Resume with the files and the settings of the run "
        "to continue exactly.",
        get_rank(),
        problem,
    )


def _compressing(train_network: nn.Cell) -> Optional[Exchange]:
    """Returns the exchange of a train step if it keeps unsent gradients."""
    exchange = getattr(train_step_of(train_network), "exchange", None)
    return exchange if exchange is not None and exchange.unsent() is not None else None


def _identity(exchange):
    """Returns the settings that must match those of the run that wrote a file."""
    return {"ranks": get_group_size(), "elements": int(exchange.unsent().size)}


def _text(identity):
    return f"{identity['ranks']} ranks with {identity['elements']:,} elements to choose from"


def _path(folder, step):
    return os.path.join(folder, f"step_{step}.rank_{get_rank()}.safetensors")


def _files_of_this_rank(folder: str) -> Dict[int, str]:
    """Returns {step: path}, oldest first."""
    pattern = rf"step_(\d+)\.rank_{get_rank()}\.safetensors"
    matches = ((re.fullmatch(pattern, entry.name), entry.path) for entry in os.scandir(folder))
    return dict(sorted((int(match.group(1)), path) for match, path in matches if match))
