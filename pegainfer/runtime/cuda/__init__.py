"""The CUDA device: driver API through cuda.bindings, kernels as cubins, graphs. Imported only when it is
asked for.
"""
