"""``tpfuse tune``: measures every candidate on this machine and writes the table that calls go by (tpfuse/tables).

    arguments.py   the command line
    proposals.py   what there is to measure: sizes, and each candidate's layouts
    measure.py     one size on the GPUs: right or wrong, then how long
    bench_*.py     what a call of each kind of operation is there
    sequence_parallel.py, block_stack.py   from how many rows on sharding them is faster: whole stacks of blocks
    timing.py      how long captured calls take, all in turns
    selection.py   from times to a short table
    job.py         the job: measure within the budget, choose, save

Nothing imports this but the command line.
"""
