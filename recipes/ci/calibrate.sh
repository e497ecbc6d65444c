#!/usr/bin/env bash
# Calibrate a merged model, check it, and propose the result: for any machine that has bash and featcal.
#
#     MERGED=user/merged HF_TOKEN=… bash calibrate.sh
#
# What it reads from its environment:
#   MERGED       the merged model: Hub id[@revision] or folder
#   PUSH_TO      the repo that gets the result [MERGED]; "none": nothing is pushed
#   PUSH_OPTIONS how it is pushed [--create-pr]; e.g. --private for a new repo
#   MAX_DRIFT    how much farther from an expert the calibrated model may be than the merged one, on any task [0.05]
#   ARGUMENTS    further arguments of featcal calibrate, e.g. --expert mnist=user/clip-mnist --data mnist=ylecun/mnist -n 128
#   WORK         a folder for this merge, with calibrated/, drift.html, drift.md and featcal.jsonl in the end [.]
#   HF_TOKEN     a token of the Hub that may write to PUSH_TO
#
# It ends with featcal's exit codes: 0 pushed, 2 something to fix (a message says what), 3 the gate: the calibrated
# model is worse on a task, and nothing is pushed. Run again after a failure, it goes on where it was.
set -euo pipefail

: "${MERGED:?MERGED is not set: give the merged model, user/name or a folder}"
PUSH_TO=${PUSH_TO:-$MERGED}
MAX_DRIFT=${MAX_DRIFT:-0.05}
read -ra arguments <<< "${ARGUMENTS:-}"
read -ra push_options <<< "${PUSH_OPTIONS---create-pr}"
mkdir -p "${WORK:=.}"
calibrate=(featcal calibrate "$MERGED" ${arguments[@]+"${arguments[@]}"} -o "$WORK/calibrated")

# 1. Find, compare and estimate everything; nothing is downloaded if something is wrong.
if [ ! -e "$WORK/calibrated" ]; then
    "${calibrate[@]}" --dry-run

    # 2. Calibrate.
    "${calibrate[@]}" --log-file "$WORK/featcal.jsonl"
fi

# 3. The gate, on other examples than those that were fitted (another seed chooses them); featcal.yaml has base, experts
#    and data at their commits.
featcal inspect-drift "$MERGED" -r "$WORK/calibrated/featcal.yaml" --compare "$WORK/calibrated" --seed 43 \
    --max-drift "$MAX_DRIFT" --html "$WORK/drift.html" --markdown "$WORK/drift.md"

# 4. Push what is finished: nothing is computed again.
if [ "$PUSH_TO" != none ]; then
    "${calibrate[@]}" --push-to "${PUSH_TO%%@*}" ${push_options[@]+"${push_options[@]}"}
fi
