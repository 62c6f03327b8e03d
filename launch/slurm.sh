#!/usr/bin/env bash
#SBATCH --job-name=tpfuse
#SBATCH --ntasks-per-node=1
#
# Start a program on the ranks of a Slurm job: one torchrun on each node, which meet at the first of them. Submit it with
# sbatch, whose options come first, or run it inside an allocation. All its arguments go to torchrun.
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --nproc-per-node 8 my_script.py --my-option
#   salloc --nodes 2 --gpus-per-node 8 launch/slurm.sh --nproc-per-node 8 my_script.py --my-option
#   launch/slurm.sh --help
set -euo pipefail
case "${1:---help}" in
    -h | --help) sed -n '5,10s/^# \{0,1\}//p' "$0"; exit ;;
esac
: "${SLURM_JOB_NODELIST:?"not in a Slurm job: submit it with sbatch"}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
: "${hosts[0]:?"scontrol names no host of $SLURM_JOB_NODELIST"}"
exec srun --nodes "${#hosts[@]}" --ntasks-per-node 1 torchrun --nnodes "${#hosts[@]}" --rdzv-backend c10d \
    --rdzv-endpoint "${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id "$SLURM_JOB_ID" "$@"
