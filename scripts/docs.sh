#!/usr/bin/env bash
# Builds the documentation with the API reference into site/; a warning is an error. It uses the linters' environment.
#   bash scripts/docs.sh            builds
#   bash scripts/docs.sh serve      builds, serves at http://127.0.0.1:8000, and follows changes
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"
make_lint_environment
cd "$ROOT"
# The theme warns of MkDocs 2.0, which docs/requirements.txt excludes.
export NO_MKDOCS_2_WARNING=true
if [ "${1:-build}" = serve ]; then exec "$LINT/mkdocs" serve; fi
# Not --quiet: it also hides warnings from --strict, which would then pass every build.
"$LINT/mkdocs" build --strict 2>&1 | { grep -v "^INFO" || true; }
