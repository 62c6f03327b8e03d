"""How a fused operation is computed: our own kernels and one adapter per library, chosen by measurement.

``candidates.py`` lists what there is for each operation, ``dispatch.py`` chooses one for a call and runs it; so do
``matmul_candidates.py`` and ``matmul.py`` for GEMMs with collectives. A kernel knows nothing of the operation that uses it.
Where a group has no symmetric arena there is nothing to run on CUDA: a graph is then left as it was. The CPU runs the
operation's reference.
"""

#: What the report calls an operation's reference where that runs.
REFERENCE = "reference"
