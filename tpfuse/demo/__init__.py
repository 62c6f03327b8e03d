"""The main job on one page: a Hugging Face causal LM, sharded over all ranks, before and after ``tpfuse.apply``.

    torchrun --nproc-per-node 2 -m tpfuse.demo --family llama       (or: tpfuse demo --family llama)

Both models answer the same random prompt greedily with a static KV cache. Logits are compared on the same tokens
(teacher forcing through the cache, so prefill and decode are both checked), tokens until the first near tie, and the
speed of both is told with the report of what was fused. Exit status: 0 equal, 1 not equal, 2 asked for what cannot be.

    arguments.py   the command line            answers.py      how a model continues a prompt
    world.py       ranks and their mesh        comparison.py   are two answers the same?
    job.py         the job

Nothing imports this but the command line.
"""
