"""Our kernels in CUDA C++: sources, how they are compiled on first use (build.py), and how they are launched."""
