#!/usr/bin/env bash
# Starts a command on several devices with msrun. It takes the positional arguments of MindFormers' msrun_launcher.sh.
# It waits for the workers, unless JOIN is False, and returns msrun's exit code, which is not 0 if one of them failed.
set -u

WORKER_NUM=8
MASTER_ADDR=127.0.0.1
MASTER_PORT=8118
NODE_RANK=0
LOG_DIR=output/msrun_log
JOIN=True  # MindFormers' default, False, returns 0 at once, whatever becomes of the workers
CLUSTER_TIME_OUT=7200

usage() {
    cat <<'END'
Usage, on one machine:
  bash msrun_launcher.sh EXECUTE_ORDER [WORKER_NUM]
  bash msrun_launcher.sh EXECUTE_ORDER WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT
and on each of several:
  bash msrun_launcher.sh EXECUTE_ORDER WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN \
      CLUSTER_TIME_OUT

  EXECUTE_ORDER     script and arguments in one word: "scripts/run_mindformer.py --config X.yaml --use_parallel True"
  WORKER_NUM        devices on all machines (8)
  LOCAL_WORKER      devices on this machine (WORKER_NUM)
  MASTER_ADDR       address of the machine with NODE_RANK 0 (127.0.0.1)
  MASTER_PORT       a free port on it (8118)
  NODE_RANK         number of this machine, from 0 (0)
  LOG_DIR           where worker_N.log and scheduler.log go (output/msrun_log)
  JOIN              True to wait for the workers and return their failure, False to return at once with 0 (True)
  CLUSTER_TIME_OUT  seconds to wait until all workers have met (7200)
END
}

fail() {
    echo "msrun_launcher.sh: error: $1" >&2
    exit 1
}

check_number() {  # name, value, smallest, largest
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        fail "$1 is '$2', it must be a number from $3 to $4."
    fi
}

case $# in
    1) ;;
    2) WORKER_NUM=$2 ;;
    6) WORKER_NUM=$2 MASTER_PORT=$3 LOG_DIR=$4 JOIN=$5 CLUSTER_TIME_OUT=$6 ;;
    9) WORKER_NUM=$2 LOCAL_WORKER=$3 MASTER_ADDR=$4 MASTER_PORT=$5 NODE_RANK=$6 LOG_DIR=$7 JOIN=$8
       CLUSTER_TIME_OUT=$9 ;;
    *) usage >&2; fail "it takes 1, 2, 6 or 9 arguments, and got $#." ;;
esac
LOCAL_WORKER=${LOCAL_WORKER:-$WORKER_NUM}

check_number WORKER_NUM "$WORKER_NUM" 1 999999
check_number LOCAL_WORKER "$LOCAL_WORKER" 1 "$WORKER_NUM"
check_number MASTER_PORT "$MASTER_PORT" 1024 65535
check_number NODE_RANK "$NODE_RANK" 0 999999
check_number CLUSTER_TIME_OUT "$CLUSTER_TIME_OUT" 1 999999999
[[ $JOIN == True || $JOIN == False ]] || fail "JOIN is '$JOIN', it must be True or False."
[[ -n $LOG_DIR ]] || fail "LOG_DIR is empty."
((10#$WORKER_NUM > 1)) || fail "one worker needs no msrun: python $1"

# msrun starts the workers with the first python on PATH.
PYTHON=$(command -v python || command -v python3) || fail "no python in PATH: activate the environment with MindSpore."
"$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mindspore") is None)' \
    || fail "$PYTHON has no mindspore: activate the environment that has it."

# Split as by a shell, with quotes, but without executing or expanding anything: '.*wq|.*wk' stays unchanged.
mapfile -d '' -t ORDER < <("$PYTHON" -c 'import shlex, sys
sys.stdout.write("".join(word + "\0" for word in shlex.split(sys.argv[1])))' "$1" 2>/dev/null)
[[ ${ORDER[0]:-} == python || ${ORDER[0]:-} == python3 ]] && ORDER=("${ORDER[@]:1}")
((${#ORDER[@]} > 0)) || fail "EXECUTE_ORDER cannot be split into words: '$1'."
[[ -f ${ORDER[0]} ]] || fail "${ORDER[0]}, which EXECUTE_ORDER starts with, is not a file in $PWD."

"$PYTHON" -m mindspore.parallel.cluster.run --worker_num="$WORKER_NUM" --local_worker_num="$LOCAL_WORKER" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --node_rank="$NODE_RANK" --log_dir="$LOG_DIR" \
    --join="$JOIN" --cluster_time_out="$CLUSTER_TIME_OUT" --bind_core=True --tail_worker_log=0 \
    "$(basename "$PYTHON")" "${ORDER[@]}"
CODE=$?
if ((CODE != 0)); then
    # The first failing worker ends the others, whose logs may then be empty.
    FAILED=$(grep -lE '^mindlora-run: (error|interrupted)' "$LOG_DIR"/worker_*.log 2>/dev/null | head -n 1)
    FAILED=${FAILED:-$(grep -lE 'Error|Traceback' "$LOG_DIR"/worker_*.log 2>/dev/null | head -n 1)}
    echo "msrun_launcher.sh: error: msrun ended with exit code $CODE, see ${FAILED:-$LOG_DIR/worker_*.log}." >&2
elif [[ $JOIN == False ]]; then
    echo "msrun_launcher.sh: JOIN is False: the workers go on, see $LOG_DIR/worker_*.log for how they end."
fi
exit "$CODE"
