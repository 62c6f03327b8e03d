"""``torchrun --nproc-per-node 2 -m tpfuse.tuner``: see job.py."""

import sys

from tpfuse.tuner import job

if __name__ == "__main__":
    sys.exit(job.main())
