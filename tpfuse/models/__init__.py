"""What tpfuse must know of the ways a model is made tensor-parallel: Hugging Face ``tp_plan``, DTensor, by hand.

Only this package knows them. What is fused is decided on graphs, which look alike for all three.
"""
