#!/usr/bin/env bash
# Figures 7 and 8 of arXiv 2511.04217 at the paper's own sizes: set up, tell the cost, run, draw.
# After a stop, whatever stopped it, the same command goes on from there. Options: bash recipes/reproduce.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."

# The virtual environment that is active, or one of the project's own.
if [ -z "${VIRTUAL_ENV:-}" ]; then
  make .venv/.ready
  VIRTUAL_ENV=$PWD/.venv
fi
export PATH="$VIRTUAL_ENV/bin:$PATH"

exec python recipes/reproduce.py "$@"
