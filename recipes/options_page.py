"""docs/options.md, made of the options themselves: what a run can be told, with default and help.

python recipes/options_page.py            # writes docs/options.md
"""

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path

from hf_slt.sharing.files import replacing
from hf_slt.text.blocks import DataArguments
from hf_slt.training.arguments import GPT2_HELP, MODEL_FIELDS, RunArguments

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Every option

Options of the model are fields of `SupermaskGPT2Config`; all of them are options of
`recipes/train_gpt2_slt.py` on the command line (`--density 0.3`) and in a YAML preset (`density: 0.3`).
The command line overrides the preset, which overrides the defaults below. The options of each `slt`
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


def table(title: str, options: Iterable[Field]) -> str:
    """One group of options."""
    rows = [f"\n## {title}\n\n| option | default | |\n|---|---|---|"]
    for one in options:
        default = one.default_factory() if callable(one.default_factory) else one.default
        shown = "" if default in (None, MISSING) else f"`{default}`"
        help = str(one.metadata.get("help") or GPT2_HELP[one.name]).replace("|", "\\|")
        rows.append(f"| `{one.name}` | {shown} | {help} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page."""
    parts = [table("The model", MODEL_FIELDS), WHY, table("The text", fields(DataArguments))]
    return HEAD + "".join(parts) + table("The run", fields(RunArguments))


if __name__ == "__main__":
    with replacing(PAGE) as temporary:
        temporary.write_text(page())
    print(f"wrote {PAGE.name}")
