"""Scores to the path of a trellis, and the path to numbers: what rule `trellis` needs of torch.

Both are single operators, so that torch.compile, torch.export and torch.func take them as they are.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..weights.codes import planes
from ..weights.random_weights import TensorSpec
from ..weights.trellis import memory_of, reachable_states
from .viterbi import nearest_path


def path_of_targets(targets: Tensor, tensor: TensorSpec) -> Tensor:
    """Return the codes of the path whose numbers are nearest to the targets, row by row.

    Args:
        targets (`Tensor`):
            What the weights should be, in units of the law and in the shape of the tensor.
        tensor ([`TensorSpec`]):
            The tensor whose table the path chooses from.

    Returns:
        `Tensor`: codes in uint8, in the shape of the tensor.
    """
    return _path(targets.detach(), *_facts(tensor))


def numbers_of_path(codes: Tensor, tensor: TensorSpec) -> Tensor:
    """Return the number of every weight in units of the law, float32, by the codes of its path.

    Args:
        codes (`Tensor`):
            Codes of one tensor.
        tensor ([`TensorSpec`]):
            The tensor, which has the table.

    Returns:
        `Tensor`: one number per weight.
    """
    return _numbers(codes.detach(), *_facts(tensor))


Facts = tuple[str, str, str, int, int, list[int]]


def _facts(tensor: TensorSpec) -> Facts:
    """Return what an operator may be given; a seed can be too large for its integers."""
    axes = list(tensor.input_axes)
    law = "uniform" if tensor.law == "xavier_uniform" else tensor.law
    return str(tensor.seed), tensor.name, law, tensor.state_bits or 0, len(tensor.factors), axes


@torch.library.custom_op("hf_slt::trellis_path", mutates_args=())
def _path(
    targets: Tensor, seed: str, name: str, law: str, state_bits: int, levels: int, axes: list[int]
) -> Tensor:
    rows, shape = _to_rows(targets.float(), axes)
    memory = memory_of(planes(levels), state_bits)
    if rows.shape[1] < memory:
        raise ValueError(
            f"{name} has {rows.shape[1]} inputs, fewer than the {memory} codes of a state; take fewer states"
        )
    if rows.device.type == "cpu" and not torch.isfinite(rows.sum()):
        raise ValueError(
            f"scores of {name} are not finite, so no path is nearest to them: the loss diverged or a checkpoint "
            "is damaged; lower the learning rate or clip gradients"
        )
    table = _table(seed, name, law, state_bits)[reachable_states(levels, state_bits)]
    return _from_rows(nearest_path(rows, torch.from_numpy(table).to(rows.device), levels), shape, axes)


@torch.library.custom_op("hf_slt::trellis_numbers", mutates_args=())
def _numbers(
    codes: Tensor, seed: str, name: str, law: str, state_bits: int, levels: int, axes: list[int]
) -> Tensor:
    rows, shape, bits = *_to_rows(codes, axes), planes(levels)
    states = torch.zeros(rows.shape, dtype=torch.int32, device=rows.device)
    for back in range(memory_of(bits, state_bits)):
        states |= rows.roll(back, -1).int() << (bits * back)
    table = torch.from_numpy(_table(seed, name, law, state_bits)).to(rows.device)
    return _from_rows(table[states & (2**state_bits - 1)], shape, axes)


@_path.register_fake
def _(targets: Tensor, *facts) -> Tensor:
    return torch.empty(targets.shape, dtype=torch.uint8, device=targets.device)


@_numbers.register_fake
def _(codes: Tensor, *facts) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


@torch.library.register_vmap("hf_slt::trellis_path")
def _(info, in_dims, targets: Tensor, *facts):
    return torch.stack([_path(one, *facts) for one in targets.unbind(in_dims[0])]), 0


@torch.library.register_vmap("hf_slt::trellis_numbers")
def _(info, in_dims, codes: Tensor, *facts):
    return torch.stack([_numbers(one, *facts) for one in codes.unbind(in_dims[0])]), 0


@lru_cache(maxsize=4096)
def _table(seed: str, name: str, law: str, state_bits: int):
    spec = TensorSpec(name, (1,), int(seed), law, state_bits=state_bits)
    return spec.draw_table()


def _to_rows(whole: Tensor, axes: Sequence[int]) -> tuple[Tensor, torch.Size]:
    """Return a tensor as (outputs, inputs), and its shape with the inputs last."""
    moved = whole.movedim(tuple(axes), tuple(range(whole.dim() - len(axes), whole.dim())))
    return moved.flatten(whole.dim() - len(axes)).flatten(0, -2).contiguous(), moved.shape


def _from_rows(rows: Tensor, shape: torch.Size, axes: Sequence[int]) -> Tensor:
    moved = rows.reshape(shape)
    return moved.movedim(tuple(range(len(shape) - len(axes), len(shape))), tuple(axes)).contiguous()
