#!/usr/bin/env bash
# Runs the linters, the formatters' checks, the type checker and the workflow check, in a separate environment (without
# MindSpore) that is created if missing. Fails on any finding.
#   bash scripts/lint.sh         only looks
#   bash scripts/lint.sh --fix   also lets ruff and clang-format change files
set -eu
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"
make_lint_environment
cd "$ROOT"

mapfile -t CPP < <(git ls-files '*.h' '*.cc' '*.cpp')
mapfile -t SHELL_SCRIPTS < <(git ls-files '*.sh' .ci/run)

if [ "${1:-}" = --fix ]; then
    "$LINT/ruff" check --fix --quiet . || true
    "$LINT/ruff" format --quiet .
    "$LINT/clang-format" -i "${CPP[@]}"
fi
"$LINT/ruff" check --quiet .
"$LINT/ruff" format --check --quiet .
"$LINT/clang-format" --dry-run --Werror "${CPP[@]}"
"$LINT/shellcheck" --external-sources "${SHELL_SCRIPTS[@]}"
"$LINT/mypy"
"$LINT/check-jsonschema" --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
# Some versions stay unpinned: those of Debian's packages, and of packages that setup.py bounds.
"$LINT/hadolint" --ignore DL3008 --ignore DL3013 scripts/docker/*
