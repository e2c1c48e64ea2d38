"""CUDA kernels on the host: their PTX, run instruction by instruction, every access checked."""
