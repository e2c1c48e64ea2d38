"""Where a model runs: one module per device, all with the operations of interface.py."""
