"""``torchrun --nproc-per-node 2 -m tpfuse.demo``: see job.py."""

import sys

from tpfuse.demo import job

if __name__ == "__main__":
    sys.exit(job.main())
