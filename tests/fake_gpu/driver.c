// The driver without a GPU: each device has a context, or PyTorch does not ask whether its streams are captured. What is
// not defined here returns 0 (see build.py).

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
