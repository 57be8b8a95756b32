#!/usr/bin/env bash
# Runs the slow set, the tests that take a minute or more: arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
exec ./scripts/test.sh -m slow "$@"
