"""Does a trained mask have structure that a coder could use? Print its bits per weight under simple models.

    python recipes/mask_structure.py runs/nano/ticket [more tickets]

`packed` is one bit per weight, `bound` is log2(n choose kept) per mask, `entropy` is the result of
hf_slt.tickets.entropy. The rows below use more than the number of kept weights: the weights of a mask are put into
groups, and each group has its own density. An urn (Beta-binomial) learns this density while coding. It starts at the
mask's density p, with the weight of `a` observations:

    P(next weight of a group is kept) = (kept so far + a p) / (seen so far + a)

The only side information is `a` (the best power of two) and which model it is: one byte per mask. If a model
needs more bits than the bound, the mask counts with the bound. The last two models use the signs of the drawn
weights, which a decoder knows from the seed.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tables import markdown_table

from hf_slt.sharing.card import entropy_bits
from hf_slt.sharing.mask_algebra import ticket_factors
from hf_slt.tickets.entropy import encode_masks
from hf_slt.tickets.format import Header, read_ticket
from hf_slt.tickets.verify import mask_path
from hf_slt.weights.random_weights import draw

SIDE_BITS = 8  # side information per mask: which model, and its `a`
lgamma = np.vectorize(math.lgamma, otypes=[float])


def urn_bits(sizes: np.ndarray, kept: np.ndarray) -> float:
    """Return the bits that urns need for groups of these sizes and kept counts, with the best `a` of a few."""
    sizes, kept = sizes[sizes > 0], kept[sizes > 0]
    density = kept.sum() / sizes.sum()
    if density in (0, 1):
        return 0.0

    def log_beta(x, y):
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    def nats(a: float) -> float:
        first, second = a * density, a * (1 - density)
        return float((log_beta(first, second) - log_beta(kept + first, sizes - kept + second)).sum())

    return min(nats(2.0**power) for power in range(1, 16)) / math.log(2)


def grouped_bits(mask: np.ndarray, groups: np.ndarray) -> float:
    """Return `urn_bits` of a mask. `groups` has the group number of each weight, or can be broadcast to that."""
    numbers = np.broadcast_to(groups, mask.shape).reshape(-1)
    return urn_bits(np.bincount(numbers), np.bincount(numbers, mask.reshape(-1)))


def rows(mask: np.ndarray) -> np.ndarray:
    """Return the number of the row of every weight."""
    return np.arange(mask.shape[0])[:, None]


def columns(mask: np.ndarray) -> np.ndarray:
    """Return the number of the column of every weight."""
    return np.arange(mask.shape[1])[None, :]


def heads(name: str, mask: np.ndarray, n_head: int) -> np.ndarray:
    """Return the head of every weight: by columns for queries, keys and values, by rows for the output projection."""
    if name.endswith(("query", "key", "value")):
        return columns(mask) * n_head // mask.shape[1]
    if name.endswith("attn.c_proj"):
        return rows(mask) * n_head // mask.shape[0]
    return np.zeros((1, 1), int)


def neighbours(mask: np.ndarray) -> np.ndarray:
    """Return a group number from the weights above and to the left: kept or not. Both are decoded earlier."""
    padded = np.pad(mask, ((1, 0), (1, 0))).astype(int)
    return 2 * padded[:-1, 1:] + padded[1:, :-1]


def measure(header: Header, name: str, mask: np.ndarray) -> dict[str, float]:
    """Return the bits of one mask under each model."""
    entry = header.tensors[name]
    sign = (draw(header.options["seed"], name, entry.shape, entry.law, entry.scale) > 0).astype(int)
    models: dict[str, Callable[[], np.ndarray]] = {
        "rows": lambda: rows(mask),
        "columns": lambda: columns(mask),
        "heads": lambda: heads(name, mask, header.config["n_head"]),
        "neighbours": lambda: neighbours(mask),
        "rows x sign": lambda: 2 * rows(mask) + sign,
        "columns x sign": lambda: 2 * columns(mask) + sign,
    }
    bound = entropy_bits(entry)
    bits = {model: min(bound, SIDE_BITS + grouped_bits(mask, groups())) for model, groups in models.items()}
    bits["rows or columns"] = min(bits["rows"], bits["columns"])
    bits["rows or columns x sign"] = min(bits["rows x sign"], bits["columns x sign"])
    return {"packed": 8.0 * -(-mask.size // 8), "bound": bound, **bits}


def report(folder: Path) -> dict[str, float]:
    """Return the bits per weight of all masks of a ticket, by model."""
    ticket = read_ticket(mask_path(folder))
    header, masks = ticket.header, {name: one != 0 for name, one in ticket_factors(ticket).items()}
    totals: dict[str, float] = {"packed": 0, "bound": 0, "entropy": 8 * encode_masks(masks).nbytes}
    for name, mask in masks.items():
        for model, bits in measure(header, name, mask).items():
            totals[model] = totals.get(model, 0) + bits
    weights = sum(mask.size for mask in masks.values())
    return {model: bits / weights for model, bits in totals.items()}


def main() -> None:
    """Print the report of every ticket that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tickets", nargs="+", type=Path, metavar="TICKET", help="folder of a ticket")
    for folder in parser.parse_args().tickets:
        found = report(folder)
        rows = [
            {
                "model": model,
                "bits per weight": f"{bits:.5f}",
                "over the bound": f"{100 * (bits / found['bound'] - 1):+.3f}%",
            }
            for model, bits in found.items()
        ]
        print(f"{folder}\n\n{markdown_table(rows, ('bits per weight', 'over the bound'))}")


if __name__ == "__main__":
    main()
