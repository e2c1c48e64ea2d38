"""CUDA kernels on the host: their PTX, translated to C, with every memory access checked."""
