"""The `cuengine` command."""
