"""One thread per process: tests run beside each other, and most of them are processes beside each other themselves."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONWARNINGS", "error::FutureWarning")  # in the rank processes; pyproject.toml says it of this one

import torch

torch.set_num_threads(1)
