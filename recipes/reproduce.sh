#!/usr/bin/env bash
# Reproduce figures 7 and 8 of arXiv 2511.04217 at the paper's own sizes: set up, print the cost, run, draw.
# After any kind of stop the same command resumes from there. Options: bash recipes/reproduce.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."

# Use the active virtual environment; without one, use .venv of the project.
if [ -z "${VIRTUAL_ENV:-}" ]; then
  make .venv/.ready
  VIRTUAL_ENV=$PWD/.venv
fi
export PATH="$VIRTUAL_ENV/bin:$PATH"

exec python recipes/reproduce.py "$@"
