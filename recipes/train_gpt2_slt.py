"""Find a ticket: train the scores of a supermask GPT-2, from text to a folder ready to share.

    accelerate launch recipes/train_gpt2_slt.py --config recipes/nano.yaml
    python recipes/train_gpt2_slt.py --train_files my/*.txt --output_dir runs/mine

Defaults < preset (--config) < command line. With --compare, controls run after the ticket on the
same data and steps, and one table and figure show them all.
"""

import sys
from pathlib import Path

from hf_slt.training.arguments import parse_arguments
from hf_slt.training.checkpoints import CheckpointError
from hf_slt.training.report import train_and_compare

TEMPLATE = Path(__file__).parent.parent / "model_cards" / "template.md"


def main() -> int:
    arguments = parse_arguments(description=__doc__.split("\n")[0])
    try:
        train_and_compare(arguments, TEMPLATE, arguments.run.prompt)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
