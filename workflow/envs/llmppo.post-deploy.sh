#!/usr/bin/env bash
# Runs in the fresh environment, from the working directory of the workflow: the checkout.
set -euo pipefail
python -m pip install -r requirements.lock
python -m pip install --no-deps -r requirements-models.lock
python -m pip install --no-deps -e .
