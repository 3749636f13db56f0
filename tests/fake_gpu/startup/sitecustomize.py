"""Read by Python at its start: cuDNN, which is not faked, is off."""

import torch

torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
