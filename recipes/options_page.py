"""Write docs/options.md from the options in the code: name, default and help of each.

    python recipes/options_page.py            # writes docs/options.md

The default is the value that recipes/train_gpt2_slt.py uses without any flag. If the preset nano.yaml sets the
option, that is the value of the preset.
"""

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path

import yaml

from hf_slt.text.blocks import DataArguments
from hf_slt.tickets.files import replacing
from hf_slt.training.arguments import GPT2_HELP, BaseArguments, RunArguments, model_fields, parse_arguments

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
PRESET = Path(__file__).with_name("nano.yaml")  # the default preset of train_gpt2_slt.py
HEAD = """# Every option

**Without `--config`, `recipes/train_gpt2_slt.py` applies the preset `recipes/nano.yaml`** and prints a line
that says so. The column *default* has the value that the script uses without any flag. If it comes from
`nano.yaml`, the entry says so, and names the value that holds otherwise: with another preset that does not
set the option, and in `SupermaskGPT2Config` from Python.

Options of the model are fields of `SupermaskGPT2Config`; all of them are options of
`recipes/train_gpt2_slt.py` on the command line (`--density 0.3`) and in a YAML preset (`density: 0.3`).
The command line overrides the preset, which overrides the defaults of the code. The options of each `slt`
command are in `slt COMMAND --help`. (This page is made of the code: `python recipes/options_page.py`.)
"""
WHY = """
**Why `scale_with_width`.** GPT-2's standard deviation of 0.02 fits width 768. With a tied embedding a
logit is a sum of n_embd kept entries times a normalised hidden state; a mask can choose entries by sign,
so the largest logit grows like 0.02 * n_embd. At width 128 that is too small to tell tokens apart, and
the mask stays at chance. True multiplies the standard deviation by 768 / n_embd in embeddings and by
sqrt(768 / n_embd) in blocks. It changes nothing at width 768; the paper's presets leave it off, `nano`
and `pocket` turn it on.
"""


def show(value: object) -> str:
    """Return a default as the page shows it; an empty text if there is none."""
    return "" if value is None or value is MISSING else f"`{value}`"


def table(title: str, options: Iterable[Field]) -> str:
    """Return the table of one group of options."""
    used, preset = parse_arguments([], preset=PRESET).flat(), yaml.safe_load(PRESET.read_text())
    rows = [f"\n## {title}\n\n| option | default | |\n|---|---|---|"]
    for one in options:
        default = one.default_factory() if callable(one.default_factory) else one.default
        shown = show(used[one.name])
        if one.name in preset:
            same = shown == show(default)
            source = (
                f"also in `{PRESET.name}`"
                if same
                else f"`{PRESET.name}`; otherwise {show(default) or 'unset'}"
            )
            shown += f" ({source})"
        help = str(one.metadata.get("help") or GPT2_HELP[one.name]).replace("|", "\\|")
        rows.append(f"| `{one.name}` | {shown} | {help} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return the whole page."""
    parts = [
        table("The architecture", fields(BaseArguments)),
        table("The model", model_fields()),
        WHY,
        table("The text", fields(DataArguments)),
    ]
    return HEAD + "".join(parts) + table("The run", fields(RunArguments))


if __name__ == "__main__":
    with replacing(PAGE) as temporary:
        temporary.write_text(page())
    print(f"wrote {PAGE.name}")
