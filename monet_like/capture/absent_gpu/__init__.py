"""What a GPU that is not there would choose: kernels, attention, autocast."""
