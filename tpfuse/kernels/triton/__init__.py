"""Our own kernels, in Triton. Nothing here is imported before a CUDA tensor needs it: Triton may be absent on a CPU."""
