"""The CUDA device: one class, given CuPy or a stand-in on the host as its runtime."""
