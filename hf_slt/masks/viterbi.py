"""The path through a trellis that is nearest to given numbers, in squared error (Viterbi, 1967).

    least_i(q) = min over j < b of cost_(i-1)(q + j * S / b)          the states that shift to q
    cost_i(s)  = least_i(floor(s / b)) + (target_i - table[s]) ** 2

with S states and b branches: the codes that can follow a state. Here states are numbered without gaps: the codes of
state s are the digits of s in base b (`hf_slt.weights.trellis.reachable_states` has them in this order).

Of equal costs the lowest state wins. A path is closed (tail-biting): the state before the first weight is the
state after the last (`hf_slt/weights/trellis.py`). That state is found first, by a search without given ends over
the end and the beginning of the row. Then the whole row is searched, with this state at both ends.

Two versions give the same codes: one uses torch operators, for any device; the other is a loop that Numba compiles,
for a CPU. Both compute in float32, with the same operations in the same order. The loop searches 32 rows at
a time, which fill vector registers; the costs of 256 states then just fit into a core's first cache.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

LANES = 32  # rows at a time
_PIECE = 1024  # costs that are compared at a time
_SETTLED = 5  # after this many times the memory of a state, paths from all starts have met


def nearest_path(targets: Tensor, table: Tensor, branches: int) -> Tensor:
    """Return the codes of the path nearest to each row of targets.

    Args:
        targets (`Tensor`):
            What the weights should be, float32, (rows, inputs).
        table (`Tensor`):
            The number of every state that a path can reach, float32, on the same device.
        branches (`int`):
            Number of codes, 2 to 16.

    Returns:
        `Tensor`: codes in uint8, (rows, inputs).
    """
    search = _compiled_search if targets.device.type == "cpu" else searched_by_torch
    return tail_biting(search, targets, table, branches)


Search = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]


def tail_biting(search: Search, targets: Tensor, table: Tensor, branches: int) -> Tensor:
    """Return the codes of paths that end in the state they begin with, found by the given search.

    Args:
        search (`Search`):
            Finds the nearest paths, with or without given states at both ends.
        targets (`Tensor`):
            What each weight should be, (rows, inputs), in units of the table.
        table (`Tensor`):
            The number of each state.
        branches (`int`):
            Number of codes.

    Returns:
        `Tensor`: codes in uint8, (rows, inputs).
    """
    states, memory = len(table), 1
    while branches**memory < states:
        memory += 1
    reach = min(targets.shape[1], _SETTLED * memory)
    window = torch.cat([targets[:, -reach:], targets[:, :reach]], 1)
    around = search(window, table, branches, None)
    ends = torch.zeros(len(targets), dtype=torch.int32, device=targets.device)
    for back in range(memory):
        ends += around[:, reach - 1 - back].int() * branches**back
    return search(targets, table, branches, ends % states)


# -- by operators of torch ---------------------------------------------------------------------------------


def searched_by_torch(targets: Tensor, table: Tensor, branches: int, ends: Tensor | None) -> Tensor:
    """Return the codes of the nearest paths, with the states `ends` at both ends if they are given.

    Args:
        targets (`Tensor`):
            What each weight should be, (rows, inputs), in units of the table.
        table (`Tensor`):
            The number of each state.
        branches (`int`):
            Number of codes.
        ends (`Tensor` or `None`):
            The state before the first and after the last weight of each row; None leaves both free.

    Returns:
        `Tensor`: codes in uint8, (rows, inputs).
    """
    rows, length = targets.shape
    states = len(table)
    numbers = torch.arange(states, device=targets.device)
    cost = torch.zeros(rows, states, device=targets.device)
    if ends is not None:
        cost.masked_fill_(numbers != ends[:, None], torch.inf)
    came = []
    for place in range(length):
        least, *others = cost.view(rows, branches, -1).unbind(1)
        origin = torch.zeros_like(least, dtype=torch.uint8)
        for branch, other in enumerate(others, 1):
            better = other < least
            least, origin = torch.where(better, other, least), origin.masked_fill(better, branch)
        came.append(origin)
        distance = targets[:, place, None] - table
        cost = least.repeat_interleave(branches, 1) + distance * distance
    if ends is None:
        ties = cost == cost.amin(1, keepdim=True)
        state = torch.where(ties, numbers, states).amin(1)
    else:
        state = ends.long()
    codes = torch.empty(rows, length, dtype=torch.uint8, device=targets.device)
    for place in range(length - 1, -1, -1):
        codes[:, place] = (state % branches).to(torch.uint8)
        shifted = state // branches
        origin = came[place].gather(1, shifted[:, None]).squeeze(1).long()
        state = shifted + origin * (states // branches)
    return codes


# -- compiled ----------------------------------------------------------------------------------------------


def _compiled_search(targets: Tensor, table: Tensor, branches: int, ends: Tensor | None) -> Tensor:
    """Return the same as `searched_by_torch`, computed by the compiled loop in as many threads as torch uses."""
    rows, length = targets.shape
    groups = -(-rows // LANES)
    lanes = torch.zeros(groups * LANES, length)
    lanes[:rows] = targets
    lanes = lanes.view(groups, LANES, length).transpose(1, 2).contiguous()
    last = np.full(groups * LANES, -1, np.int32)
    if ends is not None:
        last[:rows] = ends.numpy()
    codes = np.empty((groups, length, LANES), np.uint8)
    threads = min(torch.get_num_threads(), groups)
    parts = [slice(groups * part // threads, groups * (part + 1) // threads) for part in range(threads)]
    search, numbers = _kernel(), np.ascontiguousarray(table.numpy())

    def work(part: slice) -> None:
        search(lanes.numpy()[part], numbers, branches, last.reshape(groups, LANES)[part], codes[part])

    if threads == 1:
        work(parts[0])
    else:
        with ThreadPoolExecutor(threads) as pool:  # the loop releases the interpreter's lock
            list(pool.map(work, parts))
    return torch.from_numpy(codes).transpose(1, 2).reshape(-1, length)[:rows].contiguous()


@cache
def _kernel() -> Any:
    """Compile the loop, or take it from the cache of an earlier process. Numba is imported only for it."""
    import numba

    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(search_groups)
    except RuntimeError:  # no folder to write a cache to
        return numba.njit(**options)(search_groups)


def search_groups(targets: Any, table: Any, branches: Any, ends: Any, codes: Any) -> None:
    """Search groups of rows: targets (groups, inputs, lanes) to codes of the same shape.

    `ends` (groups, lanes) are the states before the first and after the last weight; -1 leaves both free.

    Args:
        targets:
            What each weight should be, (groups, inputs, lanes).
        table:
            The number of each state.
        branches:
            Number of codes.
        ends:
            States before the first and after the last weight, (groups, lanes); -1 leaves both free.
        codes:
            Array of the shape of the targets that the codes are written to.
    """
    groups, length, lanes = targets.shape
    states = len(table)
    shifts = states // branches
    width = shifts * lanes
    cost = np.empty(states * lanes, np.float32)
    least = np.empty(width, np.float32)
    came = np.empty((length, width), np.uint8)
    # The same memory by code: compilers vectorise loops over whole axes.
    numbers, before = table.reshape(shifts, branches), least.reshape(shifts, lanes)
    after = cost.reshape(shifts, branches, lanes)
    for group in range(groups):
        for state in range(states):
            for lane in range(lanes):
                end = ends[group, lane]
                cost[state * lanes + lane] = 0.0 if end < 0 or end == state else np.inf
        for place in range(length):
            origin = came[place]
            for start in range(0, width, _PIECE):
                stop = min(start + _PIECE, width)
                low, of_low = least[start:stop], origin[start:stop]
                low[:] = cost[start:stop]
                of_low[:] = 0
                for branch in range(1, branches):
                    rival = cost[branch * width + start : branch * width + stop]
                    for at in range(stop - start):  # without a condition: compilers can vectorise it
                        mine, its = low[at], rival[at]
                        of_low[at] = np.uint8(branch) if its < mine else of_low[at]
                        low[at] = its if its < mine else mine
            for shifted in range(shifts):
                for branch in range(branches):
                    number = numbers[shifted, branch]
                    for lane in range(lanes):
                        distance = targets[group, place, lane] - number
                        after[shifted, branch, lane] = before[shifted, lane] + distance * distance
        for lane in range(lanes):
            state = ends[group, lane]
            if state < 0:
                state = 0
                for other in range(1, states):
                    if cost[other * lanes + lane] < cost[state * lanes + lane]:
                        state = other
            for place in range(length - 1, -1, -1):
                codes[group, place, lane] = state % branches
                shifted = state // branches
                state = shifted + int(came[place, shifted * lanes + lane]) * (states // branches)
