#!/bin/bash
# One input in shards as a job array. INPUT and MODEL lie where all nodes see them:
#   sbatch --array=0-7 --export=ALL,INPUT=in.jsonl,MODEL=./model,CREATED=$(date +%s) slurm.sh
#   xla-engine merge part-*.jsonl -o out.jsonl        # afterwards
#SBATCH --job-name=xla-engine-run
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

output="part-$SLURM_ARRAY_TASK_ID.jsonl"
xla-engine run "${INPUT:?}" -o "$output" ${MODEL:+--model "$MODEL"} --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --resume --created "${CREATED:?}" --drain-timeout 60 --no-progress
status=$?
grep -qs '"finished": true' "$output.shard.json" && exit 0 # lines with errors are results
if [ $status -eq 130 ]; then # out of time; the shard goes on where it was
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $status
