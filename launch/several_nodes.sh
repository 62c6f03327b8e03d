#!/usr/bin/env bash
# Start a program on the ranks of several machines: run the same line on each of them. Everything behind the three options
# below goes to torchrun, which makes the machines meet at the endpoint (c10d rendezvous).
#
#   launch/several_nodes.sh --nnodes 2 --endpoint HOST:29500 --nproc-per-node 8 my_script.py --my-option
#   launch/several_nodes.sh --help
#
#   --nnodes N         number of machines
#   --endpoint HOST[:PORT]
#                      one of them, by a name or address that all can reach
#   --node-rank RANK   0 on that machine, 1 and so on on the others; only needed where a machine does not know itself by
#                      the endpoint's name. Which ranks a machine gets is up to the rendezvous
set -euo pipefail
nodes='' endpoint='' host=()
while true; do
    case "${1:---help}" in
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit ;;
        --nnodes) nodes=${2:?"--nnodes: how many?"} ;;
        --endpoint) endpoint=${2:?"--endpoint: where?"} ;;
        --node-rank) [[ "${2:?"--node-rank: which?"}" == 0 ]] && host=(--rdzv-conf is_host=true) || host=(--rdzv-conf is_host=false) ;;
        *) break ;;
    esac
    shift 2
done
: "${nodes:?"--nnodes N is missing"}" "${endpoint:?"--endpoint HOST[:PORT] is missing"}"
exec torchrun --nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id tpfuse "${host[@]}" "$@"
