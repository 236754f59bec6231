"""The parts of `experiments/on_gpu.py`: what is measured on a GPU, and what is made of it."""
