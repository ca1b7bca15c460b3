# What the jobs do: check the nodes, start the ranks, pass Slurm's signal on, queue again until the run is finished.
#
#   GPUS_PER_NODE      number of GPUs that the first node must have; not checked if empty
#   LAUNCHER           ranks: srun starts one per GPU (default). torchrun: srun starts one torchrun per node
#   PYTHON             default: .venv/bin/python, or python3 if there is none or in a container
#   CONTAINER          image; CONTAINER_RUNTIME is pyxis (default) or apptainer, CONTAINER_MOUNTS more folders, A:B,C:D
#   MOST_REQUEUES      maximum number of times that a job is queued again; 100
#   LONGMESH_SOURCES   digest of the sources at submission, by slurm.submit; default: the one at the first start

MOST_STUCK=3   # starts in a row without a new checkpoint, after which the job ends
MOST_REFUSED=3 # tries of a command that Slurm refuses, ten seconds apart; few, since the nodes wait meanwhile
MOST_SILENT=18 # tries of a command that its controller does not answer, as during a restart or failover
AGAIN=75       # status if the next start may succeed: a rank hung, or lost another one
HUNG_NODES=hung_nodes.txt # file in the run's folder, written by a watchdog: the nodes to exclude

fail() {
    echo "error: $*" >&2
    exit 1
}

# Runs before any rank starts: torch would try for minutes to connect to a name that does not resolve.
check_nodes() {
    local node
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        getent hosts "$node" >/dev/null ||
            fail "$(hostname) does not resolve the node name $node; enter it in DNS or /etc/hosts, or --exclude=$node"
    done
    [ -z "$GPUS_PER_NODE" ] || [ "$GPUS_PER_NODE" = "${SLURM_GPUS_ON_NODE:-0}" ] ||
        fail "GPUS_PER_NODE is $GPUS_PER_NODE, but this allocation has ${SLURM_GPUS_ON_NODE:-0} GPUs on $(hostname);" \
            "give --gres and the cluster's file the same number"
}

# Print the CPUs of each of a node's $1 tasks: an equal share of all that the job has there. With `block:block` the
# first half of the ranks then fills the first socket, to which the first half of the GPUs belongs. With a smaller
# share, ranks of the second half would be on the first socket too.
cpus_per_task() {
    local fewest requested=${SLURM_CPUS_PER_TASK:-1} share
    # As in 128(x2),96: if nodes differ, all have the share of the smallest.
    fewest=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-0}" | sed 's/(.*//' | sort -n | head -n 1)
    share=$((fewest / $1))
    echo $((share > requested ? share : requested))
}

# Put the command of one task into the array `task`, and srun's options for it into `how`.
arrange() {
    local ranks=${SLURM_NTASKS_PER_NODE:?give --ntasks-per-node}
    # A site's --export=NONE is for the job's script, and not for its ranks, which need all variables set here. Ranks
    # do not use MPI, for which a site may start a server beside each task.
    how=(--export=ALL --mpi=none --kill-on-bad-exit=1 --open-mode=append --output="$LOGS/task-%t.log")
    # Slurm's default deals tasks out to the sockets in turn, so every second rank is far from its GPU. Tasks
    # see all GPUs of their node, without --gpu-bind: NCCL reaches the memory of a neighbour only if the rank sees it.
    how+=(--distribution=block:block --cpu-bind=cores)
    task=("${PYTHON:-$([ -z "$CONTAINER" ] && [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}")
    case ${LAUNCHER:-ranks} in
    ranks) how+=(--cpus-per-task="$(cpus_per_task "$ranks")") ;;
    torchrun)
        how+=(--ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=$((ranks * $(cpus_per_task "$ranks"))))
        task+=(-m slurm.agent --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --rdzv-backend c10d
            --rdzv-endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 12000))"
            --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --log-dir "$LOGS" --tee 3)
        # One task has the CPUs of all ranks: torchrun binds each rank to those beside its GPU.
        [ "$device" != cuda ] || task+=(--numa-binding=node)
        export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]: ' ;;
    *) fail "LAUNCHER is $LAUNCHER; it must be ranks or torchrun" ;;
    esac
    [ -z "$CONTAINER" ] || case ${CONTAINER_RUNTIME:-pyxis} in
    pyxis) how+=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
        --container-workdir="$PWD") ;;
    apptainer) task=(apptainer exec --nv --bind "$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" "$CONTAINER" "${task[@]}") ;;
    *) fail "CONTAINER_RUNTIME is $CONTAINER_RUNTIME; it must be pyxis or apptainer" ;;
    esac
}

# Print the iteration of the newest checkpoint in the folder $1; nothing if there is none. The pointer file is not read,
# since it is written later.
newest_of() {
    ls "$1" 2>/dev/null | sed -n 's/^iter_0*\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1
}

# Succeed if the newest checkpoint in the folder $1 is of the run's last iteration.
finished() {
    local last wanted
    last=$(newest_of "$1")
    wanted=$(sed -n "s/^train_iters = \([0-9]*\)$/\1/p" "$1/config.toml" 2>/dev/null)
    [ "${last:--1}" -ge "${wanted:-0}" ]
}

# Put the flags that only a start without a checkpoint needs into the array `begin`, all others into `flags`, the
# configuration's file into `config` and the device into `device`.
sort_flags() {
    begin=() flags=() config= device=
    while [ $# -gt 0 ]; do
        case $1 in
        --config) config=${2-} ;;&
        --config=*) config=${1#*=} ;;&
        --device) device=${2-} ;;&
        --device=*) device=${1#*=} ;;&
        --load | --ckpt-step) begin+=("$1" "$2") && shift ;;
        --load=* | --ckpt-step=* | --finetune | --exit-on-missing-checkpoint) begin+=("$1") ;;
        *) flags+=("$1") ;;
        esac
        shift
    done
    config=$(model_file "$config")
}

# Print the file that --config $1 names: a path, or a model of configs/models, as in train/config/flags.py.
model_file() {
    local model=${1##*/}
    model=configs/models/$(tr '[:upper:]-' '[:lower:]_' <<<"${model%.toml}").toml
    case $1 in
        */*) [ "$(realpath -m "${1%/*}")" = "$(realpath -m configs)" ] || model= ;;
    esac
    if { [ ! -e "$1" ] || [ -d "$1" ]; } && [ -f "$model" ]; then echo "$model"; else echo "$1"; fi
}

# Add --device cuda if the run names no device and the job has GPUs. By default a rank without a usable GPU takes the
# CPU, and so would all nodes of a job whose PyTorch is built for CPUs.
name_device() {
    [ -n "$device" ] || device=$(sed -n 's/^ *device *= *"\([a-z]*\)".*/\1/p' "$config" 2>/dev/null | tail -n 1)
    if [ "${device:-auto}" = auto ] && [ "${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}" != 0 ]; then
        device=cuda
        flags+=(--device cuda)
    fi
}

# Print a line with digest and path for each source file that a start runs, and for the configuration's file $1.
sources() {
    local package config
    config=$(model_file "$1")
    {
        ls ./*.py
        for package in */__init__.py; do
            [ "$package" = tests/__init__.py ] || find "./${package%/*}" -name '*.py' -o -name '*.sh'
        done
        [ ! -f "$config" ] || echo "$config"
    } | LC_ALL=C sort | xargs -d '\n' sha256sum
}

# Print an eight-digit digest of standard input.
digest() {
    sha256sum | cut -c 1-8
}

# Warn if the sources are not those that the job was submitted with: a start takes them from the checkout, which people
# may edit while a job waits or trains.
check_sources() {
    local list=$LOGS/sources now submitted changed
    now=$(sources "$config")
    [ -e "$list" ] || echo "$now" >"$list"
    submitted=${LONGMESH_SOURCES:-$(digest <"$list")}
    [ "$submitted" != "$(digest <<<"$now")" ] || return 0
    changed=$(diff "$list" - <<<"$now" | sed -n 's/^[<>] [0-9a-f]*  //p' | sort -u | head -n 5 | paste -sd ' ')
    echo "WARNING: the sources are not those that the job was submitted with: digest $submitted then," \
        "$(digest <<<"$now") now${changed:+, changed $changed}; to keep them, submit in a checkout that nobody edits" \
        "(git worktree add ../NAME)"
}

# Print what ranks left when they ended: a line with status and message from each, written by runtime/slurm.py.
endings() {
    cat "$LONGMESH_ENDINGS"/rank-* 2>/dev/null
}

# Run scontrol with these arguments; try again if it is refused or not answered. Fail with its last output on stderr.
persist() {
    local words refused=0 silent=0
    until words=$(scontrol "$@" 2>&1); do
        case $words in
        *"Unable to contact"* | *"timed out"* | *"Connection refused"*) silent=$((silent + 1)) ;;
        *) refused=$((refused + 1)) ;;
        esac
        [ $refused -lt $MOST_REFUSED ] && [ $silent -lt $MOST_SILENT ] || { echo "$words" >&2 && return 1; }
        sleep 10
    done
    [ -z "$words" ] || echo "$words"
}

# Print the state of the job $1; ask for some minutes if the controller does not answer.
state_of() {
    local state try
    for ((try = 0; try < MOST_SILENT; try++)); do
        state=$(scontrol show job -o "$1" | sed -n "s/.*JobState=\([A-Z]*\).*/\1/p")
        [ -z "$state" ] || break
        sleep 10
    done
    echo "${state:-unknown}"
}

# Print Slurm's value of the field $2 for the job $1; nothing if it is unset.
known_of() {
    scontrol show job -o "$1" | sed -n "s/.* $2=\([^ (]\+\).*/\1/p"
}

# Exclude the nodes $2 from the job $1, besides those already excluded. Slurm accepts this only once the job is queued
# again, and even if too few nodes are left: the job would then wait forever. So test with a job like it first.
exclude() {
    local before nodes name value like=() said
    before=$(known_of "$1" ExcNodeList) nodes=$(known_of "$1" NumNodes)
    before=${before:+$before,}
    [[ $nodes == *-* ]] || nodes=$SLURM_NNODES # not a range, but the number of nodes that have ended
    for name in account:Account qos:QOS reservation:Reservation constraint:Features time:TimeLimit gres:TresPerNode; do
        value=$(known_of "$1" "${name#*:}")
        [ -z "$value" ] || like+=("--${name%:*}=${value#gres[:/]}")
    done
    said=$(sbatch --test-only --exclusive --nodes="$nodes" --partition="$SLURM_JOB_PARTITION" \
        "${like[@]}" --exclude="$before$2" --wrap=true 2>&1) ||
        { echo "a rank hung on $2, which the job keeps: Slurm would not start it without $2 ($said)" && return; }
    for _ in {1..30}; do
        scontrol update JobId="$1" ExcNodeList="$before$2" && echo "without $2, where a rank hung" && return
        sleep 1
    done
}

# Print how far the run in the folder $1 is: the iterations of its newest checkpoint, and of the checkpoint from which
# its last start resumed, which may be a node's own.
progress_of() {
    local newest from
    newest=$(newest_of "$1") from=$(sed -n '$s/.*"iteration": *\([0-9]*\).*/\1/p' "$1/starts.jsonl" 2>/dev/null)
    echo "${newest:-0} ${from:-0}"
}

# Queue the job $1 again, without the nodes $4. End it instead if too many starts in a row made no progress: the run $2
# is still at $3, as at the start.
queue_again() {
    local job=$1 run=$2 before=$3 nodes=$4 stuck=0
    [ "$(progress_of "$run")" != "$before" ] || stuck=$(($(sed -n 's/^\([1-9]\)$/\1/p' "$LOGS/stuck" 2>/dev/null) + 1))
    echo "$stuck" >"$LOGS/stuck"
    [ "$stuck" -lt "$MOST_STUCK" ] || fail "$MOST_STUCK starts in a row without a new checkpoint in $run;" \
        "give the job more time, lower --save-interval, or look for errors in $LOGS"
    [ "${SLURM_RESTART_COUNT:-0}" -lt "${MOST_REQUEUES:-100}" ] ||
        fail "queued again ${MOST_REQUEUES:-100} times, and not finished; raise MOST_REQUEUES"
    persist requeue "$job" ||
        fail "not finished, but scontrol requeue $job is refused; submit the command again to resume"
    echo "not finished: queued again"
    [ -z "$nodes" ] || exclude "$job" "$nodes"
}

# Start the ranks, wait for them and put their status into `status`. A signal is passed on, and noted in `told`.
run_step() {
    local showing step patience rang
    # The first task's lines are meant for people. Its log has the lines of all starts; only this start's are shown.
    touch "$LOGS/task-0.log"
    tail -n 0 -F "$LOGS/task-0.log" 2>/dev/null &
    showing=$!
    srun "${how[@]}" "${task[@]}" "$@" &
    step=$!
    # Over a link that is cut, srun never hears that the tasks have ended, and waits forever: kill it after a hang.
    { until [ -e "$run/$HUNG_NODES" ]; do sleep 5; done && sleep 60 && kill -KILL $step; } &>/dev/null &
    patience=$!
    # The time is nearly over (USR1), or another job has precedence (TERM). The ranks save and end; a second signal
    # ends them at once.
    trap 'told=1 rang=1; kill -USR1 $step 2>/dev/null' USR1 TERM
    [ -z "$told" ] || kill -USR1 $step # it came while srun began
    while rang=''; do
        wait $step
        status=$?
        [ -n "$rang" ] || break # a signal ends a wait, and not the step
    done
    trap '' USR1 TERM
    sleep 1
    kill $showing $patience 2>/dev/null
    wait $showing $patience 2>/dev/null
}

# Correct `status` by what the ranks left when they ended.
judge() {
    local errors lost
    errors=$(endings | grep -cv "^$AGAIN ") lost=$(endings | grep -c "^$AGAIN ")
    # srun returns the highest status. 143 and 137 come from tasks that were ended because another had failed with 1,
    # but also from ranks that somebody else ended, which leave nothing.
    [ "$status" -lt 128 ] || [ -n "$told" ] || [ "$errors" -eq 0 ] || status=1
    # A node that went away and is back leaves nothing either: only its peers do, and end with 1.
    [ "$status" -ne 1 ] || [ "$errors" -ne 0 ] || [ "$lost" -eq 0 ] || status=$AGAIN
    if [ -e "$run/$HUNG_NODES" ]; then # ranks of a task may have been killed by another's
        status=$AGAIN nodes=$(paste -sd, "$run/$HUNG_NODES")
    fi
}

# train RUN ENTRY FLAG...: train the run in the folder RUN, from its newest checkpoint, or as the flags say if it has
# none. Exits with the training's status.
train() {
    local told=''
    trap 'told=1' USR1 TERM
    [ $# -ge 2 ] || fail "give the run's folder, the entry and its flags: runs/NAME pretrain_gpt.py --config FILE"
    local run=$1 status before begin flags config device nodes='' job state
    LOGS=$run/logs/$SLURM_JOB_ID
    export LONGMESH_ENDINGS=$LOGS/endings
    mkdir -p "$LOGS" && rm -rf "$LONGMESH_ENDINGS" || exit 1
    shift
    sort_flags "$@"
    name_device
    before=$(progress_of "$run")
    if [ -n "$(newest_of "$run")" ]; then # these override the configuration's file
        begin=(--load "$run" --no-finetune --ckpt-step none)
    elif [[ " ${begin[*]}" != *" --load"* ]] && ! grep -qs '^ *load *=' "$config"; then
        begin=(--load "$run")
    fi
    check_nodes
    check_sources
    arrange
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST; logs of all tasks in $LOGS"

    rm -f "$run/$HUNG_NODES"
    if [ -n "$told" ]; then # before there were ranks to pass the signal to
        status=138
    else
        run_step "${flags[@]}" "${begin[@]}" --save "$run"
        judge
    fi

    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
    if [ $status -gt 0 ] && [ $status -lt 128 ] && [ $status -ne $AGAIN ]; then
        endings | cut -d ' ' -f 2- | sort | uniq -c | sort -rn | head -n 5 >&2
        exit $status # another start would end with the same error
    fi
    state=$(state_of "$job")
    if [ $status -eq 0 ] && finished "$run"; then
        echo "finished: $run"
    elif [ "$state" != RUNNING ] && [ "$state" != unknown ]; then
        echo "not finished, and not queued again: the job is $state" # otherwise scancel would only restart the job
    else
        queue_again "$job" "$run" "$before" "$nodes" # the ranks were told to end, or one was killed or hung
    fi
    exit $status
}
