"""Steps by a schedule beside plain PyTorch's."""
