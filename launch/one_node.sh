#!/usr/bin/env bash
# Start a program on several ranks of this machine. All arguments go to torchrun.
#
#   launch/one_node.sh --nproc-per-node 2 -m tpfuse.demo --family llama
#   launch/one_node.sh --nproc-per-node 8 my_script.py --my-option
#   launch/one_node.sh --help
set -euo pipefail
case "${1:---help}" in
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0" ;;
    *) exec torchrun --standalone "$@" ;;
esac
