r"""Draw the picture at the top of the README: a corner of a strict ticket, from seed and scores to the model.

    python recipes/train_gpt2_slt.py --config recipes/ternary.yaml --rule edge_popup --density 0.5 \
      --n_embd 192 --learning_rate 5e-3 --max_steps 300 --output_dir runs/strict
    python recipes/figure_idea.py runs/strict/ticket runs/strict/checkpoints/step-00000300 \
      model_cards/pocket/idea.png

random weights, drawn from the seed  |  learned scores  |  their mask: keep or drop  |  weights x mask
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from hf_slt.models.gpt2 import SupermaskGPT2Config
from hf_slt.tickets.files import replacing
from hf_slt.tickets.format import read_ticket
from hf_slt.tickets.verify import mask_path
from hf_slt.weights.codes import factors_of

TENSOR, SIDE = "h.0.mlp.c_fc", 12
BLUE, WHITE, RED, GREY = "#0072B2", "#f4f4f4", "#D55E00", "#444444"


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ticket", type=Path)
    parser.add_argument("checkpoint", type=Path, help="last checkpoint of the run, with the scores")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()

    ticket = read_ticket(mask_path(args.ticket))
    tensor = SupermaskGPT2Config.from_dict(dict(ticket.header.config)).tensor(TENSOR)
    corner = np.s_[:SIDE, :SIDE]
    weights = tensor.draw()[corner]
    factors = factors_of(tensor, ticket.arrays[TENSOR])[corner]
    scores = load_file(args.checkpoint / "model.safetensors")[f"transformer.{TENSOR}.scores"][corner]
    size = mask_path(args.ticket).stat().st_size
    scaled = ", with row scales" if ticket.header.config.get("scales") == "row" else ""
    strict = ticket.header.is_strict
    origin = f"drawn from seed {tensor.seed}, " + ("never trained" if strict else "as +c or -c")

    figure = Figure(figsize=(11, 3.5), layout="constrained")
    axes = figure.subplots(1, 4)
    three = ListedColormap([BLUE, WHITE, RED])
    shades = (
        ListedColormap([WHITE, WHITE, GREY]) if strict else three
    )  # a mask without signs is drawn in grey
    panels = (
        ("random weights", origin, np.sign(weights), three, None),
        ("scores", "learned; one for each weight", scores, "PuOr_r", np.abs(scores).max()),
        ("mask", f"what the scores decide; file {size / 1000:.0f} kB", factors, shades, None),
        ("weights x mask", f"what is used{scaled}", np.sign(weights * factors), three, None),
    )
    for axis, (title, under, values, colours, most) in zip(axes, panels, strict=True):
        most = most or 1
        axis.imshow(values, cmap=colours, vmin=-most, vmax=most)
        axis.set_title(title, fontsize=13, fontweight="bold")
        axis.set_xlabel(under, fontsize=10)
        axis.set_xticks([], [])
        axis.set_yticks([], [])
        axis.spines[:].set_visible(False)
        lines = np.arange(-0.5, SIDE)
        axis.hlines(lines, -0.5, SIDE - 0.5, color="white", linewidth=1)
        axis.vlines(lines, -0.5, SIDE - 0.5, color="white", linewidth=1)
    signs = {-1: "-", 0: "", 1: "+"}
    for axis, values in ((axes[0], np.sign(weights)), (axes[3], np.sign(weights * factors))):
        for (row, column), value in np.ndenumerate(values):
            axis.text(column, row, signs[int(value)], ha="center", va="center", color="white", fontsize=8)
    words = {1: "keep", 0: "drop"} if strict else {1: "keep", 0: "drop", -1: "flip"}
    for (row, column), value in np.ndenumerate(factors):
        colour = "white" if value else "#888888"
        axes[2].text(column, row, words[int(value)][0], ha="center", va="center", color=colour, fontsize=7)
    axes[2].set_title("mask: " + " or ".join(words.values()), fontsize=13, fontweight="bold")
    for axis, sign in zip(axes[1:3], "→=", strict=True):  # scores become a mask; times weights, the model
        axis.text(1.045, 0.5, sign, transform=axis.transAxes, fontsize=18, ha="center", va="center")
    with replacing(args.output) as temporary:
        figure.savefig(temporary, format="png", dpi=110, pil_kwargs={"optimize": True})
    print(f"drew {args.output}")


if __name__ == "__main__":
    main()
